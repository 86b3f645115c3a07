"""The same requests one at a time and many at once: in fp32 and int8 every answer is the same.

`make invariance` asks 200 of a mesh of its own and ends with an error if any answer differs.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.mesh.cluster import Mesh

MANY = 32
PRECISIONS = {"fp32": "gpu_worker.dtype=fp32", "int8": "gpu_worker.quantize=w8a8"}
_TOPICS = (
    "The lighthouse at the end of the pier",
    "Der schnelle braune Fuchs",
    "Le chat dort sur le tapis, et",
    "El sol sale por el este",
    "Привет, как дела? Сегодня",
    "今日は天気がいいので、",
    "مرحبا بالعالم، هذا",
    "नमस्ते दुनिया, यह",
    "def mean(values):\n    return sum(values) /",
    "1, 2, 3, 4, 5,",
    "😀 Happy birthday to you 🎂",
)
_PREFIXES = ("", "", "Answer in one word. ", "You keep the records of a small harbour. " * 8)


def requests(count: int, *, tokens: int) -> list[dict[str, Any]]:
    """Bodies of many lengths and languages, always the same `count`. Half of them are greedy and
    half drawn with a seed; prefixes are shared; some have stop strings, some logprobs.
    """
    random_ = random.Random(1)
    bodies: list[dict[str, Any]] = []
    for number in range(count):
        topic = random_.choice(_TOPICS)
        prompt = f"{random_.choice(_PREFIXES)}{number}. " + f"{topic} " * random_.choice(
            (1, 1, 2, 9)
        )
        body: dict[str, Any] = {"prompt": prompt.strip(), "max_tokens": random_.randint(2, tokens)}
        if number % 2:
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": number}
        else:
            body["temperature"] = 0
        if number % 5 == 1:
            body["stop"] = ["\n", " the", "."]
        if number % 3 == 0:
            body["logprobs"] = 3
        bodies.append(body)
    return bodies


async def answers(
    mesh: Mesh, bodies: list[dict[str, Any]], *, at_once: int
) -> list[dict[str, Any]]:
    """The choice of each answer: text, finish, and logprobs. Nothing is found in a cache that an
    earlier call has left, so that every call computes for itself.
    """
    free = asyncio.Semaphore(at_once)
    salt = f"{at_once} at once, {random.getrandbits(64)}"

    async def one(body: dict[str, Any]) -> dict[str, Any]:
        async with free:
            answer = await mesh.post("/v1/completions", body | {"cache_salt": salt})
        choice: dict[str, Any] = answer["choices"][0]
        return choice | {"completion_tokens": answer["usage"]["completion_tokens"]}

    return await asyncio.gather(*map(one, bodies))


async def busiest(mesh: Mesh, work: asyncio.Task[Any]) -> float:
    """The most requests that were seen to run together while `work` went on."""
    most = 0.0
    while not work.done():
        most = max(most, (await mesh.metrics())["vllm:num_requests_running"])
        await asyncio.wait([work], timeout=0.1)
    return most


async def differing(mesh: Mesh, bodies: list[dict[str, Any]]) -> list[str]:
    """Each request whose answers differ, with both of them."""
    single = await answers(mesh, bodies, at_once=1)
    work = asyncio.create_task(answers(mesh, bodies, at_once=MANY))
    most = await busiest(mesh, work)
    many = await work
    assert most > 1, "they never ran together"
    print(f"{len(bodies)} requests at 1 and at {MANY} at once, {most:.0f} seen to run together")
    return [
        json.dumps({"request": body, "alone": one, "among others": other}, ensure_ascii=False)
        for body, one, other in zip(bodies, single, many, strict=True)
        if one != other
    ]


def main() -> None:
    """Print what differs; the exit status says whether anything does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    options = parser.parse_args()
    bodies = requests(options.requests, tokens=options.tokens)
    with (
        tempfile.TemporaryDirectory() as folder,
        Mesh(Path(folder), PRECISIONS[options.precision]) as mesh,
    ):
        found = asyncio.run(differing(mesh, bodies))
    print(*found, f"{len(found)} of {len(bodies)} answers differ", sep="\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
