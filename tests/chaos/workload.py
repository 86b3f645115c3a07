"""What clients ask, and clients that ask it: each writes down what it sees, and judges nothing.

An `Ask` is a request whose answer is a function of the request (greedy, or seeded), so that two
runs of it can be compared. New ways to ask (stored requests, jobs on the bus) are one more method
of `Clients`.
"""

import asyncio
import contextlib
import itertools
import random
import re
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from shared.bus import Delivery
from shared.client import Client, RequestFailed
from shared.errors import MeshError
from shared.kv import HASH_SIZE
from shared.messages import BlocksFound, LookupBlocks, encode
from shared.nats_bus import NatsBus
from shared.subjects import inbox
from tests.chaos.history import Asked, Ended, History, How, Told, Used

WORDS = re.findall(
    r"\w+",
    "river stone lantern window garden copper winter signal harbor market engine planet thunder "
    "velvet meadow anchor basket candle desert forest",
)

Way = Literal["stream", "whole", "bus"]


class Ask(NamedTuple):
    """One request that may be asked any number of times."""

    key: str
    way: Way
    endpoint: Literal["chat", "completions"]
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


def mixed(seed: int, count: int) -> list[Ask]:
    """Requests of all shapes in turn; shorter than `streams`."""
    rng = random.Random(seed)
    shapes = itertools.islice(itertools.cycle(SHAPES), count)
    return [shape(rng, f"{shape.__name__}-{number}") for number, shape in enumerate(shapes)]


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


SHAPES: tuple[Callable[[random.Random, str], Ask], ...] = (
    whole,
    choices,
    stops,
    logprobs,
    prefill,
    bus_chat,
)


def poison(kind: str, token_id: int) -> Ask:
    """A prompt that does `kind` to the simulated engine; it alone is to fail."""
    body = {"prompt": [100, token_id, 200], "max_tokens": 8, "temperature": 0}
    return Ask(
        f"poison-{kind}", "stream", "completions", body, may_fail=("internal_error", "unavailable")
    )


def sampling(rng: random.Random, temperature: float = 0.0) -> dict[str, Any]:
    return {"temperature": temperature, "seed": rng.getrandbits(31)}


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def chat(rng: random.Random, key: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{sentence(rng, 10)} {key}"}]


class Clients:
    """Asks over HTTP and over the bus, `bus` being theirs to close."""

    def __init__(
        self,
        base_url: str,
        model: str,
        bus: NatsBus,
        history: History,
        patience_s: float,
    ) -> None:
        """`patience_s`: without an end for so long, a request counts as silent."""
        self._patience_s = patience_s
        self._base_url = base_url
        self._model = model
        self._nats = bus
        self._bus = Client(bus)
        self._history = history
        self._numbers = itertools.count()
        self._begun: set[str] = set()  # keys of asks that have got something
        self._heard = asyncio.Event()

    async def close(self) -> None:
        await self._nats.close()

    async def wait_begun(self, keys: set[str], within_s: float) -> None:
        """Return when all these asks have got something; raises `TimeoutError`."""
        async with asyncio.timeout(within_s):
            while not keys <= self._begun:
                self._heard.clear()
                await self._heard.wait()

    async def ask(self, ask: Ask, *, leave_after: int | None = None) -> str:
        """Ask to the end, or leave after so many deliveries; the name of the request."""
        request = f"{ask.key}#{next(self._numbers)}"
        self._history.add(Asked(request=request, ask=ask.key, way=ask.way, may_fail=ask.may_fail))
        how: How = "silent"
        code, detail = "", f"no end within {self._patience_s:g} s"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                how, code, detail = await self._end_of(ask, request, leave_after)
        self._history.add(Ended(request=request, how=how, code=code, detail=detail))
        return request

    async def _end_of(
        self, ask: Ask, request: str, leave_after: int | None
    ) -> tuple[How, str, str]:
        """How it ended, the error's code, what was said."""
        chunks = self._over_bus(ask) if ask.way == "bus" else self._over_http(ask)
        deliveries = 0
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    self._note(request, chunk)
                    deliveries += bool(chunk["choices"])
                    if leave_after is not None and deliveries >= leave_after:
                        return "cancelled", "", ""
        except Refused as error:
            return "failed", error.code, error.detail
        except RequestFailed as error:
            return "failed", error.openai_code or error.kind or "", error.detail
        except MeshError as error:  # what the client library itself found out
            return "failed", error.code, f"client: {error.detail}"
        except (aiohttp.ClientError, ConnectionError) as error:
            return "cut", "", f"{type(error).__name__}: {error}"
        return "finished", "", ""

    async def _over_bus(self, ask: Ask) -> AsyncIterator[dict[str, Any]]:
        body = {**ask.body, "model": self._model, "stream_options": {"include_usage": True}}
        call = self._bus.chat if ask.endpoint == "chat" else self._bus.complete
        async with contextlib.aclosing(call(**body)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _over_http(self, ask: Ask) -> AsyncIterator[dict[str, Any]]:
        """Chunks of a stream, or the whole answer as the only one. Raises `Refused`."""
        path = "chat/completions" if ask.endpoint == "chat" else "completions"
        body = {**ask.body, "model": self._model}
        if ask.way == "stream":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.post(f"{self._base_url}/v1/{path}", json=body) as response,
        ):
            if response.status != 200 or ask.way == "whole":
                yield unwrap(await response.read())
                return
            ended = False
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if ended:
                    raise Refused("", f"after its end the stream said {line[:80]!r}")
                if line.startswith(b"data: [DONE]"):
                    ended = True
                    continue
                yield unwrap(line[len(b"data: ") :])
            if not ended:
                raise ConnectionResetError("the stream ended without its end")

    def _note(self, request: str, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            numbers, text = logprobs_of(choice), text_of(choice)
            tokens = len(numbers or ()) if numbers or not text else None
            self._history.add(
                Told(
                    request=request,
                    choice=choice["index"],
                    text=text,
                    tokens=tokens,
                    logprobs=numbers or (),
                    finish=choice["finish_reason"] or "",
                )
            )
        if chunk["choices"]:
            self._begun.add(request.rpartition("#")[0])
            self._heard.set()
        usage = chunk.get("usage")
        if usage:
            prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
            self._history.add(
                Used(request=request, prompt_tokens=prompt, completion_tokens=completion)
            )


class Lookups:
    """Asks kv_tier as a worker does, again and again; each question is to be answered in time, with
    whatever: a cache that cannot say is a miss.
    """

    EVERY_S = 0.05
    ANSWER_S = 2.0  # several times what kv_tier may wait for Redis

    def __init__(self, bus: NatsBus, kv_tier: str, history: History) -> None:
        self._bus = bus
        self._kv_tier = kv_tier
        self._history = history
        self._worker = f"chaos-{secrets.token_hex(4)}"
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def burst(self, count: int) -> None:
        """All at once, so that kv_tier opens as many connections as it may."""
        subscription = await self._bus.subscribe(inbox(self._worker), self._answered)
        await asyncio.gather(*map(self._ask, range(count)))
        await subscription.unsubscribe()

    async def run(self, over: asyncio.Event) -> None:
        """One after the other until `over`, whether they are answered or not."""
        subscription = await self._bus.subscribe(inbox(self._worker), self._answered)
        questions: list[asyncio.Task[None]] = []
        while not over.is_set():
            questions.append(asyncio.create_task(self._ask(len(questions))))
            await asyncio.sleep(self.EVERY_S)
        await asyncio.gather(*questions)
        await subscription.unsubscribe()

    async def _ask(self, number: int) -> None:
        request = f"lookup#{number}"
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._history.add(Asked(request=request, ask="lookup", way="lookup"))
        question = LookupBlocks(
            lookup_id=number, worker=self._worker, block_hashes=secrets.token_bytes(4 * HASH_SIZE)
        )
        self._bus.publish(inbox(self._kv_tier), encode(question))
        how: How = "finished"
        try:
            async with asyncio.timeout(self.ANSWER_S):
                await self._waiting[number]
        except TimeoutError:
            how = "silent"
        self._history.add(Ended(request=request, how=how))

    def _answered(self, delivery: Delivery) -> None:
        found = msgspec.msgpack.decode(delivery.payload, type=BlocksFound)
        waiting = self._waiting[found.lookup_id]
        if not waiting.done():
            waiting.set_result(None)


class Refused(Exception):
    """An error of OpenAI's shape; `code` is "" if it has none."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def unwrap(data: bytes) -> dict[str, Any]:
    """The object in `data`; raises `Refused` for an error, also for what is no JSON."""
    try:
        body: dict[str, Any] = msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise Refused("", f"not JSON: {data[:200]!r}") from None
    if "error" in body:
        error = body["error"]
        raise Refused(error.get("code") or error.get("type") or "", error.get("message", ""))
    return body


def text_of(choice: dict[str, Any]) -> str:
    """What a choice says, in whatever shape."""
    said = choice.get("delta") or choice.get("message") or {}
    text: str = choice.get("text") or said.get("content") or ""
    return text


def logprobs_of(choice: dict[str, Any]) -> tuple[float, ...] | None:
    """One number per token, in either shape; None when the answer has none."""
    given = choice.get("logprobs")
    if not given:
        return None
    if "content" in given:
        return tuple(token["logprob"] for token in given["content"])
    return tuple(given["token_logprobs"])
