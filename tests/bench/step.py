"""Where a step's time goes, beside what the machine allows: `python -m tests.bench.step`.

Every line is the fastest of some rounds, in ms of all layers. `weights` and `KV` = bytes that a
step must read / read bandwidth, `products` = int8 operations / the speed of one product that stays
in the cache. The floor is the larger of weights and products, and KV: `x floor` = all / floor.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

import torch

from deploy.model import default_path
from kernels.cpu.library import PHASES, Matrix, library
from kernels.cpu.pack import pack
from services.gpu_worker.kv_policy import FULL
from services.gpu_worker.loader import load_model
from services.gpu_worker.model_runner import with_policy
from services.gpu_worker.models.fused import FusedDecoder, Span
from services.gpu_worker.models.fused_weights import pack_weights
from shared.kv import BLOCK_SIZE

CHUNK = 256  # ids of a prompt in one step
MAIN = ("qkv", "attention", "out", "gate_up", "down", "head")


def least_ms(work: Callable[[], object], rounds: int) -> float:
    """The shortest of some runs: what others on the machine took is not in it."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found) * 1e3


def bytes_per_ms(threads: int) -> float:
    """Read bandwidth of so many threads, out of the cache."""
    torch.set_num_threads(threads)
    memory = torch.ones(16 << 20, dtype=torch.int64)
    return memory.nbytes / least_ms(memory.sum, 20)


def products_per_ms() -> float:
    """Multiplications and additions of one thread, a quantization of the input included."""
    rows, inputs, outputs = 64, 1024, 1024
    packed = pack(torch.randn(outputs, inputs))
    pointers = (packed.weights.data_ptr(), packed.scales.data_ptr(), packed.offsets.data_ptr())
    matrix = Matrix(outputs, inputs, inputs, *pointers, None)
    x, y = torch.randn(rows, inputs), torch.empty(rows, outputs)
    linear = library().shoal_linear
    asked = (ctypes.byref(matrix), x.data_ptr(), rows, y.data_ptr())
    return 2 * rows * inputs * outputs / least_ms(lambda: linear(*asked), 200)


class Bench:
    """A model and the steps asked of it."""

    def __init__(self, path: Path, threads: int, tokens_max: int, kv_dtype: str) -> None:
        config, weights = load_model(path, torch.float32)
        config = with_policy(config, FULL, kv_dtype)
        arrays = pack_weights(config, weights)
        blocks = tokens_max // BLOCK_SIZE + 1
        self.decoder = FusedDecoder(config, arrays, tokens_max, blocks, threads)
        if config.kv_int8:
            self.decoder.pool.fill_(60)  # a scale of such bytes is 0.01
        else:
            self.decoder.pool.normal_()
        matrices = {k: v.size for k, v in arrays.items() if k.endswith(".weights")}
        self.head_bytes = matrices["head.weights"]
        self.layer_bytes = sum(matrices.values()) - self.head_bytes
        self.token_bytes = self.decoder.pool[0].nbytes // BLOCK_SIZE
        self._threads = threads
        self.machine = (0.0, 0.0)
        self.look()

    def look(self) -> None:
        """At the machine: bytes and int8 operations per ms, the most seen so far."""
        now = (bytes_per_ms(self._threads), products_per_ms() * self._threads)
        self.machine = (max(self.machine[0], now[0]), max(self.machine[1], now[1]))

    def line(self, name: str, steps: list[list[Span]], rounds: int) -> str:
        """Time of the steps, one after the other, by phase; beside it the floors."""
        total, phases = min((self._timed(steps) for _ in range(rounds + 1)), key=itemgetter(0))
        rest = total - sum(phases[phase] for phase in MAIN)
        self.look()
        weights, products, kv = self.floors(steps)
        times = total / (max(weights, products) + kv)
        cells = [total, *(phases[phase] for phase in MAIN), rest, weights, products, kv, times]
        return f"{name:>12}" + "".join(f"{cell:>10.2f}" for cell in cells)

    def _timed(self, steps: list[list[Span]]) -> tuple[float, dict[str, float]]:
        """Milliseconds of all, and of each phase."""
        before = self.decoder.seconds()
        total = least_ms(lambda: self._run(steps), 1)
        after = self.decoder.seconds()
        return total, {phase: (after[phase] - before[phase]) * 1e3 for phase in PHASES}

    def _run(self, steps: list[list[Span]]) -> None:
        for spans in steps:
            self.decoder.forward(spans)
        self.decoder.logits(sampled(steps[-1]), values=False)

    def floors(self, steps: list[list[Span]]) -> tuple[float, float, float]:
        """Milliseconds for weights, products, KV."""
        bandwidth, speed = self.machine
        rows = sum(len(span.ids) for spans in steps for span in spans)
        seen = sum(span.position + len(span.ids) for spans in steps for span in spans)
        operations = 2 * (rows * self.layer_bytes + len(sampled(steps[-1])) * self.head_bytes)
        read = len(steps) * self.layer_bytes + self.head_bytes
        return read / bandwidth, operations / speed, seen * self.token_bytes / bandwidth


def sampled(spans: list[Span]) -> list[int]:
    """The last row of every span."""
    ends, end = [], 0
    for span in spans:
        end += len(span.ids)
        ends.append(end - 1)
    return ends


def decode(streams: int, context: int) -> list[list[Span]]:
    """One step of so many streams that each see `context` tokens."""
    size = -(-context // BLOCK_SIZE)
    return [
        [Span([7], context - 1, [*range(i * size, (i + 1) * size)]) for i in range(streams)],
    ]


def prompt(tokens: int) -> list[list[Span]]:
    """The steps of a prompt."""
    steps = []
    for begin in range(0, tokens, CHUNK):
        end = min(begin + CHUNK, tokens)
        ids = [(7 * i + 1) % 1000 for i in range(begin, end)]
        steps.append([Span(ids, begin, [*range(-(-end // BLOCK_SIZE))])])
    return steps


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.step", description=__doc__)
    parser.add_argument("--model", type=Path, default=default_path())
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="*", default=[192, 1024])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 2000])
    options = parser.parse_args()
    cases = {f"{b} x {c}": decode(b, c) for c in options.contexts for b in options.streams}
    cases |= {f"prompt {n}": prompt(n) for n in options.prompts}
    room = [b * (c + BLOCK_SIZE) for c in options.contexts for b in options.streams]
    tokens_max = max([*room, *options.prompts])
    bench = Bench(options.model, options.threads, tokens_max, options.kv_dtype)
    bandwidth, speed = bench.machine
    print(f"reads {bandwidth / 1e6:.1f} GB/s, multiplies {speed / 1e6:.0f} G int8 operations/s")
    names = ["all", *MAIN, "rest", "| weights", "products", "KV", "x floor"]
    print(" " * 12 + "".join(f"{name:>10}" for name in names))
    for name, steps in cases.items():
        print(bench.line(name, steps, options.rounds), flush=True)


if __name__ == "__main__":
    main()
