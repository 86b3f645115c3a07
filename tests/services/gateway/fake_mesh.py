"""The rest of the mesh, played on a memory bus: tokenizer, scheduler, worker and detokenizer.

Everything speaks the real messages, so a gateway in front of it runs its real sessions. A leg's
answer is a list of pieces, one id each; a token id of a prompt is a code point.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import openai

from services.gateway.config import GatewayConfig
from services.gateway.service import Gateway
from shared.bus import Bus, Delivery
from shared.config import Launch
from shared.errors import Code
from shared.ids import count_ids, pack_ids, unpack_ids
from shared.messages import (
    Accepted,
    Beacon,
    Beat,
    Cancel,
    Detokenize,
    Detokenized,
    Failed,
    Generate,
    Message,
    PromptToken,
    Renew,
    Renewed,
    RenewedLeg,
    Started,
    Submit,
    TextDelta,
    TextRecord,
    Tokenized,
    TokenizedPrompt,
    TokenText,
    encode,
)
from shared.sampling import SamplingDefaults
from shared.subjects import beacon, beat, inbox
from shared.testing import MemoryBroker, MemoryBus, eventually, running

MODEL = "tiny"
PIECES = ["Hel", "lo", ", ", "world", "!"]
FIRST_ID = 1000


@dataclass
class Script:
    """How the mesh behaves; a test changes it at any time."""

    pieces: list[str] = field(default_factory=lambda: list(PIECES))
    logprob: float = -0.5
    step_s: float = 0.0  # between two ids
    burst: int = 1  # ids per record
    tokenizer_fails: tuple[Code, str] | None = None
    tokenizer_silent: bool = False
    fails: tuple[Code, str] | None = None  # the worker, ...
    fails_after: int = 0  # ... after so many ids
    stuck_after: int | None = None  # no more ids until told otherwise
    stop_reason: str | int | None = None
    sampling_defaults: SamplingDefaults | None = None  # of the model's files
    kv_policy: str = ""  # that leaders tell


class FakeMesh:
    """One of each, on a bus of its own."""

    def __init__(self, bus: Bus) -> None:
        self.script = Script()
        self.generated: list[Generate] = []
        self.submitted: list[Submit] = []
        self.cancelled: list[Cancel] = []
        self.sent: dict[tuple[str, int], int] = {}  # ids of legs that run
        self._bus = bus
        self._decoder = msgspec.msgpack.Decoder(Generate | Detokenize | Submit | Cancel | Renew)
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    @asynccontextmanager
    async def up(self) -> AsyncIterator["FakeMesh"]:
        for name in ("tokenizer-x", "scheduler-x", "worker-x"):
            await self._bus.subscribe(inbox(name), self._on_delivery)
        beats = asyncio.create_task(self._beat())
        try:
            yield self
        finally:
            for task in [beats, *self._tasks.values()]:
                task.cancel()

    async def _beat(self) -> None:
        while True:
            for role, name in (("tokenizer", "tokenizer-x"), ("gpu_worker", "worker-x")):
                load = len(self._tasks) if role == "gpu_worker" else 0
                self._send(
                    beat(role, name),
                    Beat(
                        instance=name,
                        role=role,
                        seq=0,
                        load=load,
                        total_blocks=100,
                        free_blocks=100 - load,
                        engine_seconds={"attention": 1.5} if role == "gpu_worker" else {},
                    ),
                )
            self._send(
                beacon("default"),
                Beacon(
                    scheduler="scheduler-x",
                    term=1,
                    pool="default",
                    model=MODEL,
                    workers=1,
                    max_model_len=4096,
                    kv_policy=self.script.kv_policy,
                ),
            )
            await asyncio.sleep(0.05)

    def _send(self, subject: str, message: Message) -> None:
        self._bus.publish(subject, encode(message))

    def _on_delivery(self, delivery: Delivery) -> None:
        message = self._decoder.decode(delivery.payload)
        match message:
            case Generate():
                self.generated.append(message)
                self._tokenize(message)
            case Detokenize():
                text = "".join(chr(token) for token in unpack_ids(message.ids))
                self._answer(message, Detokenized(**self._about(message), text=text))
            case Submit():
                self.submitted.append(message)
                self._run(message)
            case Cancel():
                self.cancelled.append(message)
                task = self._tasks.pop((message.request_id, message.choice), None)
                if task is not None:
                    task.cancel()
            case Renew():
                self._renew(message, delivery)

    # --- tokenizer ---

    def _about(self, message: Generate | Detokenize) -> dict[str, Any]:
        return {
            "request_id": message.request_id,
            "attempt": message.attempt,
            "tokenizer": "tokenizer-x",
        }

    def _answer(self, asked: Generate | Detokenize, answer: Message) -> None:
        if not self.script.tokenizer_silent:
            self._send(inbox(asked.gateway), answer)

    def _tokenize(self, message: Generate) -> None:
        if self.script.tokenizer_fails:
            code, detail = self.script.tokenizer_fails
            self._answer(
                message,
                Failed(
                    request_id=message.request_id,
                    choice=-1,
                    epoch=message.attempt,
                    code=code,
                    detail=detail,
                ),
            )
            return
        texts = message.texts or []
        if message.chat is not None:
            texts = ["".join(str(told["content"]) for told in message.chat.messages)]
        packed = message.ids or [pack_ids(ord(char) for char in text) for text in texts]
        prompts = [TokenizedPrompt(ids) for ids in packed]
        answer = Tokenized(
            **self._about(message),
            prompts=prompts,
            bad_words=[pack_ids(map(ord, word)) for word in message.bad_words or []] or None,
            sampling_defaults=self.script.sampling_defaults,
        )
        self._answer(message, answer)

    # --- scheduler, worker, detokenizer ---

    def _run(self, submit: Submit) -> None:
        leg = {
            "request_id": submit.request_id,
            "choice": submit.choice,
            "epoch": submit.epoch,
        }
        gateway = inbox(submit.gateway)
        self._send(gateway, Accepted(**leg, scheduler="scheduler-x", term=1))
        self._send(gateway, Started(**leg, worker="worker-x", detokenizer="d", num_cached_tokens=1))
        key = (submit.request_id, submit.choice)
        task = asyncio.create_task(self._generate(submit, key))
        self._tasks[key] = task
        task.add_done_callback(lambda done: self._forget(key, done))

    def _forget(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    async def _generate(self, submit: Submit, key: tuple[str, int]) -> None:
        script, count = self.script, submit.sampling.max_tokens
        pieces = list(script.pieces)
        if submit.choice:
            pieces[-1] += f"#{submit.choice}"
        if not submit.sampling.ignore_eos:
            count = min(count, len(pieces))
        index = count_ids(submit.output_ids)
        while index < count:
            if script.fails and index >= script.fails_after:
                code, detail = script.fails
                self._send(
                    inbox(submit.gateway),
                    Failed(
                        request_id=submit.request_id,
                        choice=submit.choice,
                        epoch=submit.epoch,
                        code=code,
                        detail=detail,
                        started=True,
                    ),
                )
                return
            while script.stuck_after is not None and index >= script.stuck_after:
                await asyncio.sleep(0.01)
            await asyncio.sleep(script.step_s)
            size = min(script.burst, count - index)
            self._deliver(submit, pieces, index, size, last=index + size == count)
            index += size
            self.sent[key] = index

    def _deliver(
        self, submit: Submit, pieces: list[str], index: int, size: int, *, last: bool
    ) -> None:
        said = [pieces[at % len(pieces)] for at in range(index, index + size)]
        top = submit.sampling.logprobs
        logprobs = None
        if top is not None:
            logprobs = [
                TokenText(
                    self.script.logprob,
                    piece,
                    piece.encode(),
                    [(f"{piece}{k}", f"{piece}{k}".encode(), -0.5 - k) for k in range(top)],
                )
                for piece in said
            ]
        finish = ""
        if last:
            finish = "length" if submit.sampling.max_tokens == index + size else "stop"
        record = TextRecord(
            submit.request_id,
            submit.choice,
            submit.epoch,
            index,
            pack_ids(range(FIRST_ID + index, FIRST_ID + index + size)),
            "".join(said),
            finish,
            self.script.stop_reason if last else None,
            logprobs,
            None if index else self._prompt_logprobs(submit),
        )
        self._send(inbox(submit.gateway), TextDelta(detokenizer="d", records=[record]))

    def _prompt_logprobs(self, submit: Submit) -> list[PromptToken] | None:
        """Each id's own text; id + k is its k-th alternative. The first has no log probability."""
        count = submit.sampling.prompt_logprobs
        if count is None:
            return None
        tokens = []
        for number, i in enumerate(unpack_ids(submit.prompt_ids)):
            top = [(i + k, chr(i + k), chr(i + k).encode(), -1.0 - k) for k in range(1, count + 1)]
            own = (self.script.logprob, 7, top) if number else ()
            tokens.append(PromptToken(i, chr(i), chr(i).encode(), *own))
        return tokens

    def _renew(self, message: Renew, delivery: Delivery) -> None:
        holder = delivery.subject.rpartition(".")[2]
        legs = [
            RenewedLeg(
                leg.request_id,
                leg.choice,
                leg.epoch,
                "decode" if (leg.request_id, leg.choice) in self._tasks else "unknown",
                self.sent.get((leg.request_id, leg.choice), 0),
            )
            for leg in message.legs
        ]
        self._send(inbox(message.gateway), Renewed(holder=holder, legs=legs))


@dataclass
class Front:
    """A gateway that serves HTTP before a fake mesh."""

    gateway: Gateway
    mesh: FakeMesh
    broker: MemoryBroker

    @property
    def port(self) -> int:
        return self.gateway.http.port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, api_key: str = "none") -> openai.AsyncOpenAI:
        """The official client, without its own retries."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=20
        )

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """(status, JSON, headers) of a POST; `body` is JSON to be, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, data=data, headers=headers) as answer,
        ):
            return answer.status, json.loads(await answer.read()), answer.headers

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.url + path, headers=headers) as answer,
        ):
            return answer.status, await answer.text()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All `data:` events of a stream, decoded; `[DONE]` as it is."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + path, json={**body, "stream": True}) as answer,
        ):
            assert answer.status == 200, await answer.read()
            lines = (await answer.read()).decode().split("\n\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in data]

    async def quiet(self) -> None:
        """Wait until nothing of any request is left."""
        await eventually(
            lambda: self.gateway.table.num_sessions == 0 and self.gateway.edge.idle.is_set(),
            what="no session left",
        )


@asynccontextmanager
async def front(
    buses: list[Bus] | None = None, listen_fd: int | None = None, **config: Any
) -> AsyncIterator[Front]:
    """A ready gateway with `config`, and its mesh, on two memory buses unless `buses` are given."""
    broker = MemoryBroker()
    ours, theirs = buses or [MemoryBus(broker), MemoryBus(broker)]
    launch = Launch(
        role="gateway",
        name="gateway-0",
        instance="gateway-0-x",
        model_name=MODEL,
        nats_url="",
        nats_user="",
        nats_password="",
        secret="00" * 16,
        run_dir="",
        listen_fd=listen_fd,
    )
    gateway = Gateway(launch, ours, GatewayConfig(**config))
    async with FakeMesh(theirs).up() as mesh, running(gateway):
        await eventually(lambda: gateway.http.port != 0 and not gateway.edge.not_ready())
        yield Front(gateway, mesh, broker)
