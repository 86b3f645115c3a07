"""What a KV block holds depends on more than its ids. Workers that agree on all of it share blocks,
bit for bit; a doubt makes a worker share with nobody.
"""

import hashlib
import os

import msgspec
import torch

from kernels.cpu.library import cpu_flags, library
from services.gpu_worker.loader.source import ROOT, Source
from services.gpu_worker.models.decoder import DecoderConfig
from shared.kv import BLOCK_SIZE
from shared.log import log

SIZE = 16  # bytes
_CODE = ("kernels/*.py", "services/gpu_worker/torch_model.py")  # beside what `Source.key` covers
_SWITCHES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR")


def kv_fingerprint(source: Source, config: DecoderConfig, computes: list[str]) -> bytes:
    """Of a model whose files are `source` and which `computes` so. Take it when the weights have
    been read: of files that have changed meanwhile nobody knows what was read.
    """
    try:
        key = source.key()
        if source.unchanged():
            sizes = msgspec.json.encode(config).decode()
            parts = ["1", key, sizes, str(BLOCK_SIZE), *computes]
            return hashlib.blake2b("\n".join(parts).encode(), digest_size=SIZE).digest()
    except OSError as error:
        log.warning("kv_not_shared", error=str(error))
    return os.urandom(SIZE)


def compiled() -> list[str]:
    """How the compiled step computes: whatever the number of threads, bits are the same."""
    return ["w8a8", os.path.basename(library()._name)]  # noqa: PTH119 named by all that it depends on


def in_torch(dtype: str, num_threads: int) -> list[str]:
    """How torch computes: its libraries choose an algorithm by processor and threads."""
    code = [file for pattern in _CODE for file in sorted(ROOT.glob(pattern))]
    digests = [hashlib.blake2b(file.read_bytes(), digest_size=SIZE).hexdigest() for file in code]
    flags = b" ".join(sorted(cpu_flags())).decode()
    switches = [os.environ.get(name, "") for name in _SWITCHES]
    capability = torch.backends.cpu.get_cpu_capability()
    return ["torch", dtype, str(num_threads), capability, flags, *switches, *digests]
