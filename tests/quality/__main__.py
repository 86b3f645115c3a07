"""Perplexity of each precision that a worker can be told, and its distance to fp32; and of each way
to keep less of K and V, and its distance to keeping all: `make quality`.

On two fixed texts, as the worker computes: its loader, its step, its logits. llama.cpp reads the
same where `llama-perplexity` is on PATH or named by LLAMA_PERPLEXITY.
"""

import argparse
import datetime
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import torch

from kernels.cpu.library import cpu_flags
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.kv_policy import FULL, KvPolicy
from services.gpu_worker.model_runner import (
    RunnerSettings,
    compute_dtype,
    computes_int8,
    load_runner,
)
from services.tokenizer.tokenizer import Tokenizer
from shared.gguf_file import ModelFileError
from shared.kv import BLOCK_SIZE
from shared.model_files import default_model, read_model
from tests.golden.prompts import passages
from tests.quality import llama_cpp
from tests.quality.measure import Summary, distances, windows

PAGE = Path(__file__).parents[2] / "docs" / "quality.md"
PLACE, KV_PLACE = "<!-- table -->\n", "<!-- kv table -->\n"  # in the page's template
TEMPLATE = Path(__file__).with_name("quality.md")
UNITS = (b"amx_int8", b"amx_bf16", b"avx512_vnni", b"avx512_bf16")  # that change what is computed


class Row(NamedTuple):
    """Of the table; None = not measured."""

    name: str
    told: str  # the settings that mean it
    perplexity: float
    summary: Summary | None


def settings(
    dtype: str, quantize: str, context: int, kv_dtype: str = "auto", policy: KvPolicy = FULL
) -> RunnerSettings:
    return RunnerSettings(
        kv_dtype=kv_dtype,
        kv_policy=policy,
        dtype=dtype,
        quantize=quantize,
        num_blocks=-(-context // BLOCK_SIZE),
        kv_bytes_max=0,
        max_model_len=context,
        num_threads=1,  # bf16's sums depend on their number
        step_threads=1,
    )


def precisions() -> dict[str, list[tuple[str, str]]]:
    """What this machine computes in -> every (dtype, quantize) of a worker that means it, fp32
    first. What it refuses is told.
    """
    hints = get_type_hints(WorkerConfig)
    found: dict[str, list[tuple[str, str]]] = {"fp32": [], "bf16": [], "int8": []}
    for dtype, quantize in product(get_args(hints["dtype"]), get_args(hints["quantize"])):
        try:
            int8 = computes_int8(settings(dtype, quantize, BLOCK_SIZE))
        except ValueError as error:
            print(f"{dtype} + {quantize}: {error}", file=sys.stderr)
            continue
        fp32 = compute_dtype(dtype) == torch.float32
        found["int8" if int8 else "fp32" if fp32 else "bf16"].append((dtype, quantize))
    return {name: pairs for name, pairs in found.items() if pairs}


def measure(model: Path, text: str, context: int) -> list[Row]:
    """One row for each precision, fp32 first, and one for llama.cpp where it is at hand."""
    program = llama_cpp.binary()  # first: what is missing is said before minutes have passed
    found = precisions()
    ids = Tokenizer(read_model(model)).encode(text)
    pieces = windows(ids, context)

    runners = [
        load_runner(model, progress=print_progress, **settings(*pairs[-1], context))
        for pairs in found.values()
    ]
    summaries = distances(runners[0], runners, pieces)
    rows = [
        Row(name, told(pairs), summary.perplexity, summary)
        for (name, pairs), summary in zip(found.items(), summaries, strict=True)
    ]
    if program is not None and model.is_file():
        print_progress(f"running {program}")
        count, perplexity = llama_cpp.perplexity(program, model, text, context)
        if count != len(pieces):
            raise ValueError(f"llama-perplexity read {count} windows, not {len(pieces)}")
        rows.append(Row("llama.cpp", "", perplexity, None))
    return rows


class Cache(NamedTuple):
    """A way to keep K and V."""

    name: str
    told: str
    kv_dtype: str = "auto"
    policy: KvPolicy = FULL
    computed: tuple[str, str] = ("fp32", "none")  # dtype, quantize


def caches(window: int) -> list[Cache]:
    """Those that a worker can be told, the one that keeps all first."""
    sinks = KvPolicy.of(window, 1, 0)
    return [
        Cache("all", "full"),
        Cache("all, in int8", "kv_dtype int8", "int8"),
        Cache(f"{sinks.sinks} sinks, window {window}", "sinks", policy=sinks),
        Cache(f"{sinks.sinks} sinks, window {window}, in int8", "sinks", "int8", sinks),
        Cache(f"window {window}", "window", policy=KvPolicy.of(window, 0, 0)),
        Cache("all, computed as `auto`", "full", computed=("auto", "auto")),
        Cache("all, in int8, computed as `auto`", "kv_dtype int8", "int8", FULL, ("auto", "auto")),
    ]


def measure_caches(model: Path, text: str, context: int, window: int) -> list[Row]:
    """One row for each, in fp32 where nothing else is said: what others round would hide them."""
    pieces = windows(Tokenizer(read_model(model)).encode(text), context)
    found = caches(window)
    runners = []
    for cache in found:
        told = settings(*cache.computed, context, cache.kv_dtype, cache.policy)
        runners.append(load_runner(model, progress=print_progress, **told))
    summaries = distances(runners[0], runners, pieces)
    return [
        Row(cache.name, cache.told, summary.perplexity, summary)
        for cache, summary in zip(found, summaries, strict=True)
    ]


def print_progress(text: str) -> None:
    print(text, file=sys.stderr)


def told(pairs: list[tuple[str, str]]) -> str:
    """(dtype, quantize) in words: one group for each dtype."""
    by_dtype: dict[str, list[str]] = {}
    for dtype, quantize in pairs:
        by_dtype.setdefault(dtype, []).append(quantize)
    return "; ".join(f"{dtype} + {'/'.join(values)}" for dtype, values in by_dtype.items())


def table(rows: list[Row], what: str = "computed in | `dtype` + `quantize`") -> str:
    """Markdown. The first row is what the others are compared with."""
    base = rows[0].perplexity
    lines = [
        f"| {what} | perplexity | to {rows[0].name} | mean KL | same best id |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        change = f"{100 * (row.perplexity / base - 1):+.2f} %"
        kl = same = ""
        if row.summary is not None:
            change += f" ± {100 * row.summary.change_error:.2f}"
            kl, same = f"{row.summary.kl:.4f}", f"{100 * row.summary.same_best:.1f} %"
        if row is rows[0]:
            change = kl = same = ""
        lines.append(
            f"| {row.name} | {row.told} | {row.perplexity:.3f} | {change} | {kl} | {same} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=None, help="GGUF file or directory")
    parser.add_argument("--context", type=int, default=512, help="ids of a window, 16 or more")
    parser.add_argument("--kv-context", type=int, default=1024, help="the same, of the caches")
    parser.add_argument("--kv-window", type=int, default=256, help="ids that they see")
    parser.add_argument("--write", action="store_true", help="write docs/quality.md")
    options = parser.parse_args()
    if options.context < BLOCK_SIZE:
        parser.error(f"--context: {options.context} is below {BLOCK_SIZE}")
    model = options.model or default_model()
    try:
        text = "".join(passages())
        rows = measure(model, text, options.context)
        kept = measure_caches(model, text, options.kv_context, options.kv_window)
    except (ModelFileError, ValueError) as error:
        sys.exit(str(error))
    units = ", ".join(unit.decode() for unit in UNITS if unit in cpu_flags()) or "none of note"
    head = (
        f"{model.name}, windows of {options.context} ids, of which the "
        f"second half counts. Instructions: {units}. {datetime.date.today()}."
    )
    page = f"{head}\n\n{table(rows)}\n"
    kv_page = (
        f"Windows of {options.kv_context} ids, computed in fp32.\n\n"
        f"{table(kept, 'K and V that are kept | `kv_policy`')}\n"
    )
    print(page, kv_page, sep="\n", end="")
    if options.write:
        text = TEMPLATE.read_text().replace(PLACE, page)
        PAGE.write_text(text.replace(KV_PLACE, kv_page))


if __name__ == "__main__":
    main()
