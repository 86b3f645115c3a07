"""JetStream over our own bus: the few requests that a log and a work queue need.

Not nats-py's client, which leans on the parts of nats-py that `shared.nats_bus` replaces. Two
things that the server does make this small (ADR 5):

- `Nats-Expected-Last-Subject-Sequence`: an append is a compare-and-swap on its subject.
- `republish`: what a stream has stored is said again on a plain subject, with the sequence stored
  before it. A reader reads the past by direct gets, hears the rest, and reads again whenever a
  sequence is missing: no consumer per reader that could be left behind on the server.

Source: NATS ADR-8 and ADR-31 (direct get, batches), ADR-28 (republish), ADR-13 (pull).
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from shared.bus import Bus, Delivery, Subscription
from shared.errors import DeadlineExceeded, MeshError, Unavailable
from shared.publish import read_headers
from shared.subjects import PRIVATE_INBOX

API = "$JS.API"
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
TIMEOUT_S = 2.0  # of one request; a server that restarts is back sooner
BATCH = 256  # entries of one direct get
NANO = 10**9

WRONG_SEQUENCE = frozenset({10071, 10164})
FULL = frozenset({10047, 10077})  # of the server's storage, of the stream or of the subject
OTHER_CONFIG = 10058

EOB, NONE = 204, 404  # statuses that end a batch
END_OF_PULL = frozenset({404, 408, 409})


class WrongLastSequence(MeshError):
    """Somebody else has appended to the subject since; nothing was stored."""


class StreamFull(Unavailable):
    """A limit of the stream is reached; nothing was stored."""


class StreamConfig(Struct, frozen=True, kw_only=True):
    """A stream as the server is asked for it; -1 = no limit, times in nanoseconds."""

    name: str
    subjects: list[str]
    retention: Literal["limits", "workqueue"]
    max_age: int
    max_bytes: int
    max_msgs: int = -1
    max_msgs_per_subject: int = -1
    storage: Literal["file"] = "file"
    discard: Literal["new"] = "new"
    discard_new_per_subject: bool = False
    allow_direct: bool = False
    republish: dict[str, str] | None = None


class ConsumerConfig(Struct, frozen=True, kw_only=True):
    """A durable pull consumer as the server is asked for it; times in nanoseconds."""

    durable_name: str
    ack_wait: int
    max_deliver: int
    max_ack_pending: int
    ack_policy: Literal["explicit"] = "explicit"
    deliver_policy: Literal["all"] = "all"
    replay_policy: Literal["instant"] = "instant"


class Entry(NamedTuple):
    """One stored message. `before` = the sequence that its subject had before it, as far as the
    server says: 0 for the first of a subject, and for the first of a read.
    """

    seq: int
    before: int
    payload: bytes


class Usage(NamedTuple):
    """What a stream holds."""

    messages: int
    bytes: int


class _Error(Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _State(Struct, frozen=True):
    messages: int = 0
    bytes: int = 0


class _Answer(Struct, frozen=True):
    error: _Error | None = None
    seq: int = 0
    state: _State = _State()


class JetStream:
    """Requests to the JetStream of one account. All raise `Unavailable` when it does not answer:
    what was asked may have been done all the same.
    """

    def __init__(self, bus: Bus, timeout_s: float = TIMEOUT_S) -> None:
        self._bus = bus
        self._timeout_s = timeout_s
        self._inbox = f"{PRIVATE_INBOX}.{secrets.token_hex(12)}"
        self._numbers = itertools.count()
        self._batches: dict[str, Callable[[Delivery], None]] = {}
        self._subscription: Subscription | None = None
        self._subscribing = asyncio.Lock()

    async def ensure_stream(self, config: StreamConfig) -> None:
        """Create the stream, or give the one that is there this configuration."""
        body = msgspec.json.encode(config)
        answer = await self._ask(f"STREAM.CREATE.{config.name}", body)
        if answer.error is not None and answer.error.err_code == OTHER_CONFIG:
            answer = await self._ask(f"STREAM.UPDATE.{config.name}", body)
        _check(answer)

    async def ensure_consumer(self, stream: str, config: ConsumerConfig) -> None:
        """Create the consumer, or give the one that is there this configuration."""
        body = msgspec.json.encode({"stream_name": stream, "config": config})
        _check(await self._ask(f"CONSUMER.CREATE.{stream}.{config.durable_name}", body))

    async def usage(self, stream: str) -> Usage:
        """How much the stream holds now."""
        answer = _check(await self._ask(f"STREAM.INFO.{stream}", b""))
        return Usage(answer.state.messages, answer.state.bytes)

    async def purge(self, stream: str, subject: str) -> None:
        """Forget everything stored on `subject`."""
        body = msgspec.json.encode({"filter": subject})
        _check(await self._ask(f"STREAM.PURGE.{stream}", body))

    async def append(self, subject: str, payload: bytes, last: int) -> int:
        """Store `payload` if `last` is the subject's last sequence (0 = none); its sequence.

        Raises `WrongLastSequence`, `StreamFull`.
        """
        return _check(await self._request(subject, payload, {EXPECTED: str(last)})).seq

    async def read(self, stream: str, subject: str, after: int = 0) -> list[Entry]:
        """What is stored on `subject` behind the sequence `after`, in order."""
        async with self._subscribing:
            if self._subscription is None:
                self._subscription = await self._bus.subscribe(f"{self._inbox}.*", self._on_batch)
        entries: list[Entry] = []
        pending = 1
        while pending:
            page, pending = await self._page(stream, subject, after)
            entries += page
            after = page[-1].seq if page else after
        return entries

    async def _page(self, stream: str, subject: str, after: int) -> tuple[list[Entry], int]:
        """One direct get: its entries, and how many are left."""
        inbox = f"{self._inbox}.{next(self._numbers)}"
        page: list[Entry] = []
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def take(delivery: Delivery) -> None:
            status, headers = read_headers(delivery.headers)
            if status == 0:
                page.append(_entry(headers, delivery.payload))
            elif not ended.done():
                if status in (EOB, NONE):
                    ended.set_result(int(headers.get("Nats-Num-Pending", 0)) if page else 0)
                else:
                    ended.set_exception(Unavailable(f"JetStream: status {status} to a read"))

        self._batches[inbox] = take
        asked = {"batch": BATCH, "next_by_subj": subject, "seq": after + 1}
        try:
            self._bus.publish(f"{API}.DIRECT.GET.{stream}", msgspec.json.encode(asked), inbox)
            async with asyncio.timeout(self._timeout_s):
                return page, await ended
        except TimeoutError:
            raise Unavailable("JetStream did not answer a read", retry_after_s=1.0) from None
        finally:
            del self._batches[inbox]

    def _on_batch(self, delivery: Delivery) -> None:
        take = self._batches.get(delivery.subject)
        if take is not None:
            take(delivery)

    async def _ask(self, what: str, body: bytes) -> _Answer:
        return await self._request(f"{API}.{what}", body, None)

    async def _request(
        self, subject: str, payload: bytes, headers: dict[str, str] | None
    ) -> _Answer:
        try:
            delivery = await self._bus.request(subject, payload, self._timeout_s, headers)
            return msgspec.json.decode(delivery.payload, type=_Answer)
        except (DeadlineExceeded, Unavailable, msgspec.MsgspecError) as error:
            raise Unavailable(f"JetStream: {error}", retry_after_s=1.0) from None


class Job:
    """One delivery of a job. Until it is settled it comes again, to anybody, whenever the
    consumer's wait has passed since the delivery or the last `working`.
    """

    def __init__(self, bus: Bus, delivery: Delivery) -> None:
        self.name = delivery.subject.rpartition(".")[2]
        self._bus = bus
        self._reply = delivery.reply

    def done(self) -> None:
        """It never comes again."""
        self._bus.publish(self._reply, b"+ACK")

    def again(self) -> None:
        """It comes again at once."""
        self._bus.publish(self._reply, b"-NAK")

    def working(self) -> None:
        """The wait begins anew."""
        self._bus.publish(self._reply, b"+WPI")


class WorkQueue:
    """The jobs of one durable consumer, pulled one at a time."""

    def __init__(self, bus: Bus, stream: str, consumer: str) -> None:
        self._bus = bus
        self._subject = f"{API}.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = f"{PRIVATE_INBOX}.{secrets.token_hex(12)}"
        self._arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self._subscription: Subscription | None = None

    async def next(self, wait_s: float) -> Job | None:
        """The next job; None when none came in `wait_s`. A job that comes later, because an answer
        was slow, is that of the next call.
        """
        if self._subscription is None:
            put = self._arrived.put_nowait
            self._subscription = await self._bus.subscribe(self._inbox, put)
        if self._arrived.empty():
            asked = {"batch": 1, "expires": int(wait_s * NANO)}
            self._bus.publish(self._subject, msgspec.json.encode(asked), self._inbox)
        try:
            async with asyncio.timeout(wait_s + 0.5):
                delivery = await self._arrived.get()
        except TimeoutError:
            return None
        return self._job(delivery)

    async def close(self) -> None:
        """Pull no more. What has come and nobody has asked for is given back."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None
        while not self._arrived.empty():
            job = self._job(self._arrived.get_nowait())
            if job is not None:
                job.again()

    def _job(self, delivery: Delivery) -> Job | None:
        status, _ = read_headers(delivery.headers)
        return None if status in END_OF_PULL else Job(self._bus, delivery)


def heard(delivery: Delivery) -> Entry:
    """The entry in a message that a stream has republished."""
    _, headers = read_headers(delivery.headers)
    return _entry(headers, delivery.payload)


def _entry(headers: dict[str, str], payload: bytes) -> Entry:
    before = int(headers.get("Nats-Last-Sequence", 0))
    return Entry(int(headers["Nats-Sequence"]), before, payload)


def _check(answer: _Answer) -> _Answer:
    error = answer.error
    if error is None:
        return answer
    if error.err_code in WRONG_SEQUENCE:
        raise WrongLastSequence(error.description)
    if error.err_code in FULL:
        raise StreamFull(f"JetStream: {error.description}", retry_after_s=5.0)
    if error.code in (404, 503):
        raise Unavailable(f"JetStream: {error.description}", retry_after_s=1.0)
    raise MeshError(f"JetStream: {error.description} ({error.err_code})")
