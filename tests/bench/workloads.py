"""What is asked. Every server gets the same requests; no two rounds have a prompt in common."""

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from tests.bench.servers import Server
from tests.bench.stats import percentile, poisson_times
from tests.bench.stream import Answer, EventReader, ask

IDS = range(1000, 30000)  # words of every vocabulary of the families we read
LOAD_SHARE = 0.7  # of capacity, in the open loop
BEGUN = 32  # tokens that each running stream has when the long prompt arrives
POLL_S = 0.005

Metrics = dict[str, float]


class Shape(NamedTuple):
    """Ids in, ids out."""

    prompt: int
    output: int


class Task(NamedTuple):
    """One workload of one round at one server."""

    server: Server
    salt: str  # of prompts; the same for all servers
    capacity: float  # output tokens per second that this server was seen to reach, for open loops


class Workload(NamedTuple):
    """`shown` names the metrics of its table; of throughput more is better, of all others less."""

    name: str
    title: str
    shown: Sequence[str]
    run: Callable[[Task], Awaitable[Metrics]]
    usual: bool = True  # else only when it is named


def prompt_ids(salt: str, count: int) -> list[int]:
    rng = random.Random(salt)
    return [rng.choice(IDS) for _ in range(count)]


async def complete(
    server: Server, ids: list[int], output: int, reader: EventReader | None = None
) -> Answer:
    """Stream exactly `output` greedy ids."""
    body = _sampling(server, output) | {"prompt": ids}
    return await ask(f"{server.base_url}/v1/completions", body, reader)


def _sampling(server: Server, output: int) -> dict[str, Any]:
    return {
        "model": server.model,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def summary(answers: Sequence[Answer], wall_s: float) -> Metrics:
    """The metrics of `vllm bench serve`; times in ms."""
    itls = [itl for answer in answers for itl in answer.itls_s]
    times = {
        "ttft": [answer.ttft_s for answer in answers],
        "tpot": [answer.tpot_s for answer in answers],
        "itl": itls,
        "e2el": [answer.e2el_s for answer in answers],
    }
    return {
        "tok_s": sum(answer.output_tokens for answer in answers) / wall_s,
        "prompt_tok_s": sum(answer.prompt_tokens for answer in answers) / wall_s,
        "requests": len(answers),
        "requests_s": len(answers) / wall_s,
        "cached_percent": 100
        * sum(a.cached_tokens for a in answers)
        / sum(a.prompt_tokens for a in answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "output_tokens": sum(answer.output_tokens for answer in answers),
        **{
            f"{name}_p{share}_ms": 1e3 * percentile(values, share / 100)
            for name, values in times.items()
            for share in (50, 99)
        },
    }


def closed(streams: int, each: int, shape: Shape) -> Callable[[Task], Awaitable[Metrics]]:
    """`streams` at once, each asking `each` requests one after the other."""

    async def run(task: Task) -> Metrics:
        async def one(stream: int) -> list[Answer]:
            return [
                await complete(
                    task.server, prompt_ids(f"{task.salt} {stream} {n}", shape.prompt), shape.output
                )
                for n in range(each)
            ]

        start = time.perf_counter()
        answers = await _all([one(stream) for stream in range(streams)])
        return summary([a for of_one in answers for a in of_one], time.perf_counter() - start)

    return run


def open_loop(count: int, shape: Shape) -> Callable[[Task], Awaitable[Metrics]]:
    """`count` requests arrive by chance, at `LOAD_SHARE` of what the server can do."""

    async def run(task: Task) -> Metrics:
        rate = LOAD_SHARE * task.capacity / shape.output
        times = poisson_times(rate, count, random.Random(task.salt))
        start = time.perf_counter()

        async def one(number: int) -> Answer:
            await asyncio.sleep(start + times[number] - time.perf_counter())
            ids = prompt_ids(f"{task.salt} {number}", shape.prompt)
            return await complete(task.server, ids, shape.output)

        answers = await _all([one(number) for number in range(count)])
        return summary(answers, time.perf_counter() - start) | {"rate": rate}

    return run


def shared_prefix(streams: int, each: int, output: int) -> Callable[[Task], Awaitable[Metrics]]:
    """Chats that begin with the same long instructions, new in each round: one asks first and is
    not counted, then all others.
    """

    async def run(task: Task) -> Metrics:
        rng = random.Random(task.salt)
        rules = [
            f"Rule {n}: prefer {rng.choice(_WORDS)} to {rng.choice(_WORDS)}." for n in range(60)
        ]

        async def one(who: int) -> list[Answer]:
            return [await chat(f"Question {who}-{n}: what do the rules say?") for n in range(each)]

        async def chat(question: str) -> Answer:
            messages = [
                {"role": "system", "content": " ".join(rules)},
                {"role": "user", "content": question},
            ]
            body = _sampling(task.server, output) | {"messages": messages}
            return await ask(f"{task.server.base_url}/v1/chat/completions", body)

        await chat("Which rule comes first?")
        start = time.perf_counter()
        answers = await _all([one(who) for who in range(streams)])
        return summary([a for of_one in answers for a in of_one], time.perf_counter() - start)

    return run


_WORDS = ["short answers", "long answers", "numbers", "words", "tables", "lists", "examples"]


def interference(streams: int, shape: Shape, long: int) -> Callable[[Task], Awaitable[Metrics]]:
    """`streams` are under way when a prompt of `long` ids arrives: what they notice of it."""

    async def run(task: Task) -> Metrics:
        readers = [EventReader() for _ in range(streams)]

        def one(number: int) -> Awaitable[Answer]:
            ids = prompt_ids(f"{task.salt} {number}", shape.prompt)
            return complete(task.server, ids, shape.output, readers[number])

        running = asyncio.ensure_future(_all([one(number) for number in range(streams)]))
        try:
            while any(len(reader.times) < BEGUN for reader in readers) and not running.done():
                await asyncio.sleep(POLL_S)
            arrival = await complete(task.server, prompt_ids(task.salt, long), 1)
            answers = await running
        finally:
            running.cancel()
        begun = max(answer.times[0] for answer in answers)
        calm = intervals(answers, begun, arrival.sent_s)
        disturbed = overlapping(answers, arrival.sent_s, arrival.times[0])
        calm_ms, late_ms = 1e3 * percentile(calm, 0.5), 1e3 * percentile(disturbed, 0.99)
        return {
            "calm_itl_p50_ms": calm_ms,
            "itl_p99_ms": late_ms,
            "p99_by_calm_p50": late_ms / calm_ms,
            "long_ttft_ms": 1e3 * arrival.ttft_s,
            "requests": streams + 1,
            "output_tokens": sum(answer.output_tokens for answer in answers) + 1,
            "prompt_tokens": sum(a.prompt_tokens for a in answers) + arrival.prompt_tokens,
        }

    return run


def intervals(answers: Sequence[Answer], start: float, end: float) -> list[float]:
    """Between events of a stream, both from `start` to `end`."""
    return [
        later - sooner
        for answer in answers
        for sooner, later in itertools.pairwise(answer.times)
        if start <= sooner and later <= end
    ]


def overlapping(answers: Sequence[Answer], start: float, end: float) -> list[float]:
    """Between events of a stream, where any of it lies between `start` and `end`."""
    return [
        later - sooner
        for answer in answers
        for sooner, later in itertools.pairwise(answer.times)
        if later > start and sooner < end
    ]


async def _all(work: Sequence[Awaitable[Any]]) -> list[Any]:
    """Their results; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


USUAL = Shape(128, 128)
CAPACITY = "streams-32"  # the workload whose throughput is a server's capacity
STREAMS = ("tok_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "itl_p99_ms")
PROMPT = ("prompt_tok_s", "ttft_p50_ms")

# The dearest comes last: it is what a run out of time (`--minutes`) leaves out.
WORKLOADS = [
    Workload("streams-1", "1 stream, 128 in, 128 out", STREAMS, closed(1, 4, USUAL)),
    Workload("streams-8", "8 streams, 128 in, 128 out", STREAMS, closed(8, 2, USUAL)),
    Workload(CAPACITY, "32 streams, 128 in, 128 out", STREAMS, closed(32, 1, USUAL)),
    Workload("streams-64", "64 streams, 128 in, 128 out", STREAMS, closed(64, 1, USUAL)),
    Workload("prompt-512", "Prompts of 512, one by one", PROMPT, closed(1, 6, Shape(512, 1))),
    Workload("prompt-2000", "Prompts of 2,000, one by one", PROMPT, closed(1, 3, Shape(2000, 1))),
    Workload("poisson", "Open loop at 70 % of capacity, 128 in, 128 out",
             ("tok_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "e2el_p50_ms"),
             open_loop(40, USUAL)),
    Workload("chat", "8 chats at once with the same instructions, 64 out",
             ("tok_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "cached_percent"),
             shared_prefix(8, 3, 64)),
    Workload("long-prompt", "8 streams when a prompt of 6,000 arrives",
             ("calm_itl_p50_ms", "itl_p99_ms", "p99_by_calm_p50", "long_ttft_ms"),
             interference(8, Shape(128, 384), 6000)),
    Workload("context", "64 streams, 1,024 in, 128 out", STREAMS, closed(64, 1, Shape(1024, 128))),
    Workload("short", "256 at once, 16 in, 16 out: what a request costs beside a model",
             ("requests_s", "tok_s", "e2el_p50_ms"), closed(256, 4, Shape(16, 16)), usual=False),
]  # fmt: skip
