"""What the HTTP and the bus edge share: check a request, open it, see its events, let it go.

Everything here runs on the actor's loop. A request is open from `Edge.open` to the end of its
`with` block; leaving the block early, for whatever reason, cancels it.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import msgspec
from msgspec.structs import replace

from services.gateway.auth import Keys
from services.gateway.calls import Calls
from services.gateway.config import GatewayConfig
from services.gateway.events import SessionEnd, SessionEvent, SessionSpec
from services.gateway.feed import Feed
from services.gateway.meters import Measure, Meter
from services.gateway.openai.answer import Answer, answer
from services.gateway.openai.chat import check_chat
from services.gateway.openai.completions import check_completion
from services.gateway.openai.errors import PayloadTooLarge
from services.gateway.openai.request import Caller, Checked
from services.gateway.openai.responses import check_response
from services.gateway.openai.tokens import Tokenizing
from services.gateway.opening import PROMPT_LOGPROBS_MAX
from services.gateway.sessions import SessionTable
from services.gateway.stored.events import Submitted
from services.gateway.stored.store import Store, request_id_of
from services.gateway.view import MeshView
from shared.clock import Clock
from shared.config import Launch
from shared.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    Overloaded,
    Unavailable,
)
from shared.ids import pack_ids, unpack_ids
from shared.kv import tenant_salt
from shared.messages import Detokenize, Detokenized, Generate, Tokenized

CHECKS = {"chat": check_chat, "completions": check_completion, "responses": check_response}
PROMPT_FIELD = {"chat": "messages", "completions": "prompt", "responses": "input"}
RETRY_S = 1.0
LARGE = 1 << 18  # bytes of a body; megabytes made for it take a second to decode


def new_request_id() -> str:
    """128 random bits, 32 hex digits."""
    return uuid.uuid4().hex


@dataclass(slots=True, frozen=True)
class Parts:
    """The cores of a gateway, and how to send what they put out."""

    table: SessionTable
    calls: Calls
    view: MeshView
    store: Store
    clock: Clock
    flush: Callable[[], None]
    stats: Callable[[], dict[str, int]]
    connected: Callable[[], bool]


class Reader(Protocol):
    """Somebody who waits here for the events of a request."""

    def fail(self, error: MeshError) -> None:
        """Tell them `error` instead."""


class Open:
    """One open request as an edge sees it."""

    def __init__(self, edge: "Edge", checked: Checked) -> None:
        self.checked = checked
        self.created = int(time.time())
        self.feed = Feed(edge.config.feed_ids_max)
        self._edge = edge
        self._measure = Measure(edge.meter, edge.parts.clock)
        self.meter = edge.meter
        self.config = edge.config

    @property
    def ended(self) -> bool:
        return self._measure.ended

    @property
    def request_id(self) -> str:
        return self.checked.spec.request_id

    def answer(self, echoes: list[str]) -> Answer:
        return answer(self.checked, self.created, echoes)

    def emit(self, event: SessionEvent) -> None:
        """Count the event and queue it for the reader; nothing follows the end."""
        if self.ended:
            return
        self._measure.take(event)
        self.feed.emit(event)

    def fail(self, error: MeshError) -> None:
        """End it for our own sake; its reader is told `error`."""
        if not self.ended:
            self.emit(SessionEnd(error, 0, 0, 0))
            self._edge.cancel(self.request_id, error.code)

    def __enter__(self) -> "Open":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._edge.close(self)


class Edge:
    """The one way in for both edges."""

    def __init__(self, launch: Launch, config: GatewayConfig, parts: Parts, meter: Meter) -> None:
        self.config = config
        self.parts = parts
        self.meter = meter
        self.model = launch.model_name
        self.keys = Keys(config.api_keys)
        self.draining = False  # no new connection is taken; what comes on the open ones is served
        self._closed = False
        self.started = int(time.time())
        self._instance = launch.instance
        self._secret = bytes.fromhex(launch.secret)
        self._readers: set[Reader] = set()
        self._large_bytes = 0
        self._prompt_logprobs = 0  # of the open requests, in entries
        self._large = asyncio.Lock()
        self.idle = asyncio.Event()  # no reader is here
        self.idle.set()

    # --- what may be asked ---

    @contextlib.asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """Decode and check a body of `size` inside. Large ones get a turn of the loop each, however
        many arrive at once, so that beats and everybody's tokens go out in between.
        """
        if size < LARGE:
            yield
            return
        async with self._large:
            await asyncio.sleep(0)
            yield

    def caller(self, tenant: str, timeout_ms: str | int | None, spent_s: float = 0.0) -> Caller:
        """A new request of `tenant`; `spent_s` = what its arrival has already cost.

        Raises `InvalidRequest` for a timeout that is not a number of milliseconds.
        """
        timeout_s = self.config.request_timeout_s
        if timeout_ms is not None:
            try:
                asked_s = int(timeout_ms) / 1000
            except (ValueError, OverflowError):
                asked_s = 0.0
            if asked_s <= 0:
                raise InvalidRequest("The request timeout must be a positive number of ms.")
            timeout_s = min(timeout_s, asked_s)
        return Caller(
            request_id=new_request_id(),
            tenant=tenant,
            timeout_s=max(timeout_s - spent_s, 0.001),
            model=self.model,
            secret=self._secret,
            choices_max=self.config.choices_max,
            shared_prefix=self.keys.shares_prefixes(tenant),
        )

    def check(
        self,
        endpoint: str,
        body: bytes,
        caller: Caller,
        *,
        packed: bool = False,
        streams: bool = False,
    ) -> Checked:
        """The request in `body`; raises `MeshError`. `streams` = when the body does not say."""
        if len(body) > self.config.body_bytes_max:
            raise PayloadTooLarge(f"The body is over {self.config.body_bytes_max} bytes.")
        checked = CHECKS[endpoint](body, caller, packed=packed, streams=streams)
        # MessagePack is at most 9/4 as long as the same JSON (a number such as 1e1).
        if len(body) * 9 / 4 > self.config.wire_bytes_max:
            size = wire_bytes(checked.spec)
            if size > self.config.wire_bytes_max:
                raise PayloadTooLarge(
                    f"The prompt takes {size} bytes, over {self.config.wire_bytes_max}.",
                    param=PROMPT_FIELD[checked.endpoint],
                )
        return checked

    def stored_id(self, tenant: str, key: str | None) -> str:
        """What a stored request is called: the same for the same key of a tenant."""
        return new_request_id() if key is None else request_id_of(self._secret, tenant, key)

    def stored(self, request_id: str, asked: Submitted, *, streams: bool = False) -> Checked:
        """The request in a log, with what is left of its time; raises `MeshError`."""
        remaining_s = asked.created + asked.timeout_s - time.time()
        caller = replace(
            self.caller(asked.tenant, None),
            request_id=request_id,
            timeout_s=max(remaining_s, 0.001),
        )
        packed = asked.body[:1] >= b"\x80"
        return self.check(asked.endpoint, asked.body, caller, packed=packed, streams=streams)

    def not_ready(self) -> str:
        """Why this gateway cannot serve now; "" when it can."""
        table = self.parts.table
        if self.draining:
            return "this gateway is stopping"
        if not self.parts.connected():
            return "this gateway is not connected to the bus"
        if not self.parts.view.led:
            return "no scheduler leads the pool"
        if not table.leading.workers:
            return "no worker is ready"
        if not table.tokenizers:
            return "no tokenizer is ready"
        return ""

    # --- requests ---

    @contextlib.contextmanager
    def room(self, body_bytes: int) -> Iterator[None]:
        """Hold room for a body until its request has ended; raises `Overloaded` when there is
        none. Many large bodies would fill the memory of every process that they pass through;
        small ones, bounded by their number, are never refused for the sake of large ones.
        """
        large = body_bytes if body_bytes >= LARGE else 0
        if large and self._large_bytes + large > self.config.large_bytes_max:
            raise Overloaded("The open requests hold too many bytes.", retry_after_s=RETRY_S)
        self._large_bytes += large
        try:
            yield
        finally:
            self._large_bytes -= large

    def open(self, checked: Checked) -> Open:
        """Open a session; use as a context manager. Raises `Unavailable` after the drain, and
        `Overloaded` while others hold what this one would need.
        """
        entries = prompt_entries(checked.spec)
        if self._prompt_logprobs + entries > self.config.prompt_logprobs_max:
            raise Overloaded(
                "The open requests hold too many log probabilities of prompts.",
                retry_after_s=RETRY_S,
            )
        request = Open(self, checked)
        self._enter(request)
        self._prompt_logprobs += entries
        self.parts.table.open(checked.spec, request.emit, self.parts.clock())
        self.parts.flush()
        return request

    def close(self, request: Open) -> None:
        """The reader is done with it, or gone."""
        self._prompt_logprobs -= prompt_entries(request.checked.spec)
        self._leave(request)
        if not request.ended:
            self.cancel(request.request_id, "client")

    def cancel(self, request_id: str, reason: str) -> None:
        """End a session; one that has ended is left alone."""
        self.parts.table.cancel(request_id, reason, self.parts.clock())
        self.parts.flush()

    def fail_all(self, error: MeshError) -> None:
        """Tell every reader that its request ends here, and take no other."""
        self._closed = True
        for reader in list(self._readers):
            reader.fail(error)

    @contextlib.contextmanager
    def reading(self, reader: Reader) -> Iterator[None]:
        """`reader` waits inside; raises `Unavailable` after the drain, `Overloaded`."""
        if len(self._readers) >= self.config.sessions_max:
            raise Overloaded("Too many answers are read here.", retry_after_s=RETRY_S)
        self._enter(reader)
        try:
            yield
        finally:
            self._leave(reader)

    def _enter(self, reader: Reader) -> None:
        if self._closed:
            raise Unavailable("This gateway is stopping.", retry_after_s=RETRY_S)
        self._readers.add(reader)
        self.idle.clear()

    def _leave(self, reader: Reader) -> None:
        self._readers.discard(reader)
        if not self._readers:
            self.idle.set()

    # --- questions to a tokenizer ---

    async def tokenize(self, asked: Tokenizing, tenant: str) -> list[int]:
        """The ids of a text or a conversation; raises `MeshError`."""
        message = Generate(
            request_id=new_request_id(),
            attempt=0,
            gateway=self._instance,
            chat=asked.chat,
            texts=None if asked.text is None else [asked.text],
            add_special_tokens=asked.add_special_tokens,
            salt=tenant_salt(self._secret, tenant),
        )
        answered = await self._ask(message)
        assert isinstance(answered, Tokenized)
        return unpack_ids(answered.prompts[0].prompt_ids)

    async def detokenize(self, ids: list[int]) -> str:
        """The text of `ids`; raises `MeshError`."""
        message = Detokenize(
            request_id=new_request_id(), attempt=0, gateway=self._instance, ids=pack_ids(ids)
        )
        answered = await self._ask(message)
        assert isinstance(answered, Detokenized)
        return answered.text

    async def echoes(self, checked: Checked) -> list[str]:
        """The text of each prompt, if the request wants it back, asked for while the request runs
        and within its time; raises `MeshError`.
        """
        spec = checked.spec
        if not checked.echo:
            return []
        if spec.texts is not None:
            return spec.texts
        try:
            async with asyncio.timeout(spec.timeout_s):
                return [await self.detokenize(ids) for ids in spec.ids or []]
        except TimeoutError:
            raise DeadlineExceeded(f"no answer in {spec.timeout_s:g} s.") from None

    async def _ask(self, message: Generate | Detokenize) -> Tokenized | Detokenized:
        future: asyncio.Future[Tokenized | Detokenized | MeshError]
        future = asyncio.get_running_loop().create_future()

        def answered(what: Tokenized | Detokenized | MeshError) -> None:
            if not future.done():
                future.set_result(what)

        self.parts.calls.ask(message, answered, self.parts.clock())
        self.parts.flush()
        try:
            result = await future
        finally:
            self.parts.calls.forget(message.request_id)
        if isinstance(result, MeshError):
            raise result
        return result

    # --- metrics ---

    def measure(self) -> None:
        """Bring the gauges up to date."""
        view, table = self.parts.view, self.parts.table
        self.meter.mesh(view)
        self.meter.sessions(table.num_sessions, table.num_legs, table.redrives)
        self.meter.process(self.parts.stats())
        self.meter.engines(view.engine_seconds, view.engine_counts)


def wire_bytes(spec: SessionSpec) -> int:
    """What the input of `spec` takes on the bus."""
    if spec.chat is not None:
        return len(msgspec.msgpack.encode(spec.chat))
    if spec.texts is not None:
        return sum(len(text.encode()) + 5 for text in spec.texts)
    return sum(4 * len(ids) + 5 for ids in spec.ids or [])


def prompt_entries(spec: SessionSpec) -> int:
    """How many log probabilities of prompts the answer may hold: a byte is a token at most."""
    count = spec.sampling.prompt_logprobs
    if count is None:
        return 0
    return min(wire_bytes(spec) * spec.n * (count + 1), PROMPT_LOGPROBS_MAX)
