"""Closed-loop load on a running mesh: `make bench`.

Definitions follow `vllm bench serve`: TTFT = sent to first chunk with `choices`; TPOT = (last chunk
- first) / (output tokens - 1), per request; throughput = output tokens of all requests / wall time.
"""

import argparse
import asyncio
import statistics
import time
from typing import NamedTuple

import openai


class Timed(NamedTuple):
    """One finished request."""

    ttft_s: float
    tpot_s: float
    output_tokens: int


async def one(client: openai.AsyncOpenAI, model: str, prompt: list[int], tokens: int) -> Timed:
    """Stream one greedy completion of exactly `tokens` ids."""
    sent = time.perf_counter()
    first = last = 0.0
    count = 0
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices:
            last = time.perf_counter()
            first = first or last
        if chunk.usage:
            count = chunk.usage.completion_tokens
    return Timed(first - sent, (last - first) / max(1, count - 1), count)


async def round_of(
    client: openai.AsyncOpenAI, model: str, streams: int, shape: tuple[int, int], salt: int
) -> str:
    """Run `streams` requests at once and describe them in one line."""
    prompt_tokens, output_tokens = shape
    prompts = [
        [1000 + (salt * 7919 + stream * 131 + i * 17) % 40000 for i in range(prompt_tokens)]
        for stream in range(streams)
    ]
    start = time.perf_counter()
    done = await asyncio.gather(*(one(client, model, p, output_tokens) for p in prompts))
    wall = time.perf_counter() - start
    throughput = sum(timed.output_tokens for timed in done) / wall
    ttft = statistics.median(timed.ttft_s for timed in done) * 1e3
    tpot = statistics.median(timed.tpot_s for timed in done) * 1e3
    return (
        f"{streams:>3} streams {prompt_tokens}/{output_tokens}: {throughput:7.1f} tok/s"
        f"  TTFT p50 {ttft:7.0f} ms  TPOT p50 {tpot:6.1f} ms"
    )


async def main() -> None:
    """Print three rounds per number of streams, after one that does not count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    shape = (options.prompt_tokens, options.output_tokens)
    client = openai.AsyncOpenAI(base_url=f"{options.base_url}/v1", api_key="none", timeout=600)
    model = (await client.models.list()).data[0].id
    await round_of(client, model, 1, shape, salt=0)
    for number in range(options.rounds):
        for streams in options.streams:
            salt = 1 + number * 100 + streams
            print(await round_of(client, model, streams, shape, salt), flush=True)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main())
