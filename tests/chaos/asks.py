"""What clients ask: requests whose answers are functions of them (greedy, or seeded), so that two
runs of one can be compared. All of it is a function of the seed.
"""

import itertools
import random
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

WORDS = re.findall(
    r"\w+",
    "river stone lantern window garden copper winter signal harbor market engine planet thunder "
    "velvet meadow anchor basket candle desert forest",
)

Way = Literal["stream", "whole", "bus", "response", "polled", "keyed", "kept", "job"]
"""A stream, a whole answer, a stream on the bus; then what outlives its gateway: a response as a
stream, one in the background, a whole one under a key, a stored chat, a job on the bus.
"""

STORED_WAYS = frozenset({"response", "polled", "keyed", "kept", "job"})
TWICE = frozenset({"keyed", "job"})
"""Sent by two clients at once under one key: there is one answer, and both get it."""

BEGINS_LATE = frozenset({"whole", "keyed"})
"""Nothing comes before all of it."""

TURNS = 4  # of a conversation
INSTRUCTIONS_WORDS = 150  # a dozen blocks
ANSWER_WORDS = 40


class Ask(NamedTuple):
    """One request that may be asked any number of times."""

    key: str
    way: Way
    endpoint: Literal["chat", "completions", "responses"]
    body: dict[str, Any]
    may_fail: tuple[str, ...] = ()


def streams(seed: int, count: int, tokens: int) -> list[Ask]:
    """Streams of a known length, each with another prompt; every fifth over the bus."""
    rng = random.Random(seed)
    asks = []
    for number in range(count):
        body = {
            "prompt": f"{sentence(rng, 12)} Story {seed}-{number}:",
            "max_tokens": tokens,
            "ignore_eos": True,
            **sampling(rng),
        }
        asks.append(
            Ask(f"stream-{number}", "bus" if number % 5 == 4 else "stream", "completions", body)
        )
    return asks


def conversations(seed: int, count: int, tokens: int) -> list[Ask]:
    """Streams in the middle of conversations: all begin with the same instructions, and each turn
    with those before it. Every fifth over the bus.
    """
    rng = random.Random(f"{seed}/conversations")
    instructions = {"role": "system", "content": sentence(rng, INSTRUCTIONS_WORDS)}
    said: list[dict[str, str]] = []
    asks = []
    for number in range(count):
        if number % TURNS == 0:
            said = [instructions]
        said = [*said, *chat(rng, f"{seed}-{number}")]
        body = {"messages": said, "max_tokens": tokens, "ignore_eos": True, **sampling(rng)}
        way: Way = "bus" if number % 5 == 4 else "stream"
        asks.append(Ask(f"turn-{number}", way, "chat", body))
        said = [*said, {"role": "assistant", "content": sentence(rng, ANSWER_WORDS)}]
    return asks


def stored(seed: int, count: int, tokens: int) -> list[Ask]:
    """Stored requests in turn, as long as `streams`."""
    rng = random.Random(seed)
    asks = []
    for number, shape in zip(range(count), itertools.cycle(STORED_SHAPES), strict=False):
        ask = shape(rng, f"long-{shape.__name__}-{number}")
        limit = "max_output_tokens" if ask.endpoint == "responses" else "max_tokens"
        asks.append(ask._replace(body={**ask.body, limit: tokens, "ignore_eos": True}))
    return asks


def mixed(seed: int, count: int) -> list[Ask]:
    """Requests of all shapes in turn; shorter than `streams`."""
    rng = random.Random(seed)
    shapes = itertools.islice(itertools.cycle(SHAPES), count)
    return [shape(rng, f"{shape.__name__}-{number}") for number, shape in enumerate(shapes)]


def salted(asks: list[Ask], salt: str) -> list[Ask]:
    """The same asks, with the same answers, of which no cache holds anything yet. Responses have no
    salt of their own.
    """
    return [
        ask if ask.endpoint == "responses" else ask._replace(body={**ask.body, "cache_salt": salt})
        for ask in asks
    ]


def whole(rng: random.Random, key: str) -> Ask:
    """A whole answer of two choices."""
    body = {"prompt": f"{sentence(rng, 8)} {key}", "max_tokens": 40, "n": 2, **sampling(rng, 0.8)}
    return Ask(key, "whole", "completions", body)


def choices(rng: random.Random, key: str) -> Ask:
    """Three choices in one stream, with logprobs."""
    body = {"messages": chat(rng, key), "max_tokens": 60, "n": 3, "logprobs": True}
    return Ask(key, "stream", "chat", body | {"top_logprobs": 2} | sampling(rng, 0.7))


def stops(rng: random.Random, key: str) -> Ask:
    """Ends at whichever of some letters comes first; they lie across tokens, too."""
    body = {"prompt": f"{sentence(rng, 6)} {key}", "max_tokens": 200, "ignore_eos": True}
    letters = rng.sample(["n t", "s a", "ight", "ould", "e co", "y w"], 3)
    return Ask(key, "stream", "completions", body | {"stop": letters} | sampling(rng, 0.9))


def logprobs(rng: random.Random, key: str) -> Ask:
    """A stream that says how many tokens each delivery holds."""
    body = {"prompt": f"{sentence(rng, 6)} {key}", "max_tokens": 80, "logprobs": 1}
    return Ask(key, "stream", "completions", body | {"presence_penalty": 0.5} | sampling(rng))


def prefill(rng: random.Random, key: str) -> Ask:
    """A prompt of well over a thousand tokens."""
    body = {"prompt": f"{key} {sentence(rng, 1200)}", "max_tokens": 24, **sampling(rng)}
    return Ask(key, "stream", "completions", body)


def bus_chat(rng: random.Random, key: str) -> Ask:
    """A chat over NATS."""
    return Ask(key, "bus", "chat", {"messages": chat(rng, key), "max_tokens": 60, **sampling(rng)})


def response(rng: random.Random, key: str) -> Ask:
    """A response, event by event."""
    return _response(rng, key, "response")


def polled(rng: random.Random, key: str) -> Ask:
    """A response in the background."""
    return _response(rng, key, "polled")


def keyed(rng: random.Random, key: str) -> Ask:
    """A whole response."""
    return _response(rng, key, "keyed")


def kept(rng: random.Random, key: str) -> Ask:
    """A stored chat."""
    return bus_chat(rng, key)._replace(way="kept")


def job(rng: random.Random, key: str) -> Ask:
    """A completion that is handed in on the bus."""
    body = {"prompt": f"{sentence(rng, 8)} {key}", "max_tokens": 60, **sampling(rng, 0.8)}
    return Ask(key, "job", "completions", body)


def _response(rng: random.Random, key: str, way: Way) -> Ask:
    body = {"input": f"{sentence(rng, 10)} {key}", "max_output_tokens": 60, **sampling(rng, 0.8)}
    return Ask(key, way, "responses", body)


Shape = Callable[[random.Random, str], Ask]
STORED_SHAPES: tuple[Shape, ...] = (response, kept, job, polled, keyed)
SHAPES: tuple[Shape, ...] = (
    *(whole, choices, stops, logprobs, prefill, bus_chat),
    *STORED_SHAPES,
)


GREEDY = {"temperature": 0}
POISONED = ("internal_error", "unavailable")
"""What a request may be told that ends whoever reads it."""


def poison(kind: str, token_id: int) -> Ask:
    """A prompt that does `kind` to the simulated engine; it alone is to fail."""
    body = {"prompt": [100, token_id, 200], "max_tokens": 8, **GREEDY}
    return Ask(f"poison-{kind}", "stream", "completions", body, may_fail=POISONED)


def lethal(role: str, marker: str) -> Ask:
    """`marker` is in what a process of `role` is sent of it: in the prompt that a tokenizer gets,
    in the stop strings that a detokenizer gets with the first ids. It alone is to fail.
    """
    prompt, stop = (marker, []) if role == "tokenizer" else ("A story:", [marker])
    body = {"prompt": prompt, "stop": stop, "max_tokens": 60, "ignore_eos": True, **GREEDY}
    return Ask(f"lethal-{role}", "stream", "completions", body, may_fail=POISONED)


def sampling(rng: random.Random, temperature: float = 0.0) -> dict[str, Any]:
    return {"temperature": temperature, "seed": rng.getrandbits(31)}


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def chat(rng: random.Random, key: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{sentence(rng, 10)} {key}"}]
