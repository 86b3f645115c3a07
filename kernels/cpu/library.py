"""The compiled step: built from the sources beside this file, once per compiler, flags and CPU."""

import ctypes
import functools
import hashlib
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE / "built"  # beside the sources: nothing of ours lies outside the checkout
SOURCES = ("vector.h", "team.h", "gemm.h", "attention.h", "step.cpp")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-shared",
    "-fPIC",
    "-pthread",
)
PHASES = (
    "norm",
    "qkv",
    "rope",
    "attention",
    "out_input",
    "out",
    "mlp_input",
    "gate_up",
    "gated",
    "down",
    "head",
)
WIDENED = 16  # pages of int8 that are widened at a time: `WIDENED` of attention.h
SCALE_BYTES = 2 * 16 * 4  # behind a page of int8: for each token of the keys and of the values
GROUP_MAX = 128  # query heads of one KV head: `TILE_ROWS_MAX` of attention.h
_POINTER = ctypes.c_void_p


class BuildError(Exception):
    """The library cannot be built or loaded here; the text says why."""


class Matrix(ctypes.Structure):
    """`Matrix` of gemm.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("out", "in_", "group")),
        *((name, _POINTER) for name in ("weights", "scales", "offsets", "bias")),
    ]


class Layer(ctypes.Structure):
    """`Layer` of step.cpp."""

    _fields_ = [
        *((name, Matrix) for name in ("qkv", "attention_out", "gate_up", "down")),
        *((name, _POINTER) for name in ("attention_norm", "query_norm", "key_norm")),
        *((name, _POINTER) for name in ("attention_post_norm", "mlp_norm", "mlp_post_norm")),
        *((name, ctypes.c_int32) for name in ("window", "sinks", "local")),
    ]


class Model(ctypes.Structure):
    """`Model` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "hidden_padded", "inner_padded")),
        *((name, ctypes.c_int32) for name in ("num_layers", "heads", "kv_heads")),
        *((name, ctypes.c_int32) for name in ("dims", "dims_padded", "rotary_dims")),
        *((name, ctypes.c_int32) for name in ("vocab", "gelu")),
        *((name, ctypes.c_float) for name in ("eps", "query_scale", "attention_cap")),
        *((name, ctypes.c_float) for name in ("logits_cap", "embedding_scale")),
        ("embedding", _POINTER),
        ("layers", ctypes.POINTER(Layer)),
        ("norm", _POINTER),
        ("head", Matrix),
        *((name, _POINTER) for name in ("cosines", "sines", "local_cosines", "local_sines")),
        ("pages", _POINTER),
        ("int8_pages", ctypes.c_int32),
    ]


class AttentionTile(ctypes.Structure):
    """`HeadPages` and `AttentionTile` of attention.h."""

    _fields_ = [
        ("pool", _POINTER),
        ("page_stride", ctypes.c_size_t),
        ("table", _POINTER),
        *((name, ctypes.c_int) for name in ("dims", "int8")),
        *((name, _POINTER) for name in ("queries", "sink_queries")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "position", "window", "sinks")),
        ("cap", ctypes.c_float),
        ("out", _POINTER),
        ("out_stride", ctypes.c_int),
        *((name, _POINTER) for name in ("scores", "weights", "widened")),
    ]


class Step(ctypes.Structure):
    """`Step` of step.cpp."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rows", "spans", "pages_max")),
        *((name, _POINTER) for name in ("ids", "span", "tables")),
    ]


class Logits(ctypes.Structure):
    """`Logits` of step.cpp."""

    _fields_ = [
        ("rows", ctypes.c_int32),
        *((name, _POINTER) for name in ("of", "values", "best", "sound")),
    ]


@functools.cache
def library(architecture: str = "native") -> ctypes.CDLL:
    """The library for this machine, built if need be (seconds). Raises `BuildError`.

    `architecture` as the compiler knows it; one without dot instructions gets plain loops.
    """
    lib = ctypes.CDLL(str(_built(Path(os.environ.get("CXX", "g++")), architecture)))
    refused = lib.shoal_begin()
    if refused:
        raise BuildError(f"the system does not lend the matrix unit: {os.strerror(refused)}")
    lib.shoal_large_pages.restype = None
    lib.shoal_large_pages.argtypes = [_POINTER, ctypes.c_size_t]
    lib.shoal_open.restype = ctypes.c_void_p
    lib.shoal_open.argtypes = [ctypes.POINTER(Model), ctypes.c_int]
    lib.shoal_forward.restype = ctypes.c_int
    lib.shoal_forward.argtypes = [ctypes.c_void_p, ctypes.POINTER(Step)]
    lib.shoal_logits.restype = ctypes.c_int
    lib.shoal_logits.argtypes = [ctypes.c_void_p, ctypes.POINTER(Logits)]
    lib.shoal_seconds.restype = None
    lib.shoal_seconds.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_double)]
    lib.shoal_linear.argtypes = [ctypes.POINTER(Matrix), _POINTER, ctypes.c_int, _POINTER]
    lib.shoal_linear.restype = None
    lib.shoal_attend.argtypes = [ctypes.POINTER(AttentionTile)]
    lib.shoal_attend.restype = None
    lib.shoal_elementwise.argtypes = [ctypes.c_int, _POINTER, ctypes.c_int]
    lib.shoal_elementwise.restype = None
    lib.shoal_spread.argtypes = [_POINTER, ctypes.c_int]
    lib.shoal_spread.restype = None
    lib.shoal_close.restype = None
    lib.shoal_close.argtypes = [ctypes.c_void_p]
    return lib


def _built(compiler: Path, architecture: str) -> Path:
    """Path of the shared object. Two that build at once each finish with a rename."""
    flags = [*FLAGS, f"-march={architecture}"]
    file = BUILT / f"step-{_key(compiler, flags)}.so"
    if file.exists():
        return file
    unfinished = file.with_suffix(f".{os.getpid()}")
    command = [str(compiler), *flags, str(HERE / "step.cpp"), "-o", str(unfinished)]
    try:
        BUILT.mkdir(exist_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        unfinished.replace(file)
    except OSError as error:  # no compiler, no room
        raise BuildError(f"{compiler}: {error}") from error
    return file


def _key(compiler: Path, flags: list[str]) -> str:
    """What the result depends on: sources, flags, compiler, and the processor's abilities."""
    digest = hashlib.blake2b(digest_size=12)
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    digest.update(" ".join(flags).encode())
    try:
        told = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    except OSError as error:
        raise BuildError(f"{compiler}: {error}") from error
    digest.update(told)
    digest.update(b" ".join(sorted(cpu_flags())))
    return digest.hexdigest()


def cpu_flags() -> set[bytes]:
    """What the processor can do, by the kernel's names."""
    for line in Path("/proc/cpuinfo").read_bytes().splitlines():
        if line.startswith(b"flags"):
            return set(line.partition(b":")[2].split())
    return set()
