"""A proxy in front of NATS that reads what clients send: whose link it is, which subscriptions it
holds, and messages by subject, which it can drop, repeat, delay and reorder.
"""

import asyncio
import json
import random
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from tests.shared.proxy import Link, Proxy

REORDER_MAX_S = 0.1  # a message waits no longer than this for one to overtake it


class Command(NamedTuple):
    """One command of a client; `raw` has its payload and line ends."""

    verb: bytes
    args: list[bytes]
    raw: bytes

    @property
    def subject(self) -> str:
        """Of a message; "" for other commands."""
        return self.args[0].decode() if self.verb in (b"PUB", b"HPUB") else ""


class Commands:
    """Cuts what a client sends into whole commands; the rest waits."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Command]:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n")) >= 0:
            verb, *args = bytes(self._buffer[:end]).split()
            size = end + 2
            if verb in (b"PUB", b"HPUB"):
                size += int(args[-1]) + 2
            if len(self._buffer) < size:
                return
            raw = bytes(self._buffer[:size])
            del self._buffer[:size]
            yield Command(verb, args, raw)


Verb = Literal["drop", "duplicate", "delay", "reorder"]


class MessageRule:
    """Does `verb` to a share of the messages on subjects like `pattern` (a shell pattern)."""

    def __init__(
        self, verb: Verb, pattern: str, share: float, seed: int, delay_s: float = 0.3
    ) -> None:
        self.verb = verb
        self.pattern = pattern
        self.hits = 0
        self._share = share
        self._delay_s = delay_s
        self._rng = random.Random(seed)

    def matches(self, command: Command) -> bool:
        return bool(command.subject) and fnmatchcase(command.subject, self.pattern)

    def draws(self) -> bool:
        """Whether the next message that matches is hit."""
        return self._rng.random() < self._share

    def apply(self, link: "NatsLink", command: Command) -> list[bytes]:
        """What of the message goes on now; what goes later is seen to."""
        self.hits += 1
        raw = command.raw
        match self.verb:
            case "drop":
                return []
            case "duplicate":
                return [raw, raw]
            case "delay":
                link.send_later(raw, self._delay_s)
                return []
            case "reorder":
                link.overtaken.append(raw)
                link.send_overtaken_soon()
                return []


class LethalRule(MessageRule):
    """Nobody gets a message on a subject like `pattern` that has `marker` in it: `end` is called
    with the instance that was to read it, at once, or it would miss the message and go on.
    """

    def __init__(self, pattern: str, marker: bytes, end: Callable[[str], None]) -> None:
        super().__init__("drop", pattern, share=1.0, seed=0)
        self._marker = marker
        self._end = end

    def matches(self, command: Command) -> bool:
        return super().matches(command) and self._marker in command.raw

    def apply(self, link: "NatsLink", command: Command) -> list[bytes]:
        self._end(command.subject.rpartition(".")[2])
        return super().apply(link, command)


class NatsLink:
    """What is known of one client beside its link."""

    def __init__(self, link: Link) -> None:
        self.commands = Commands()
        self.subscriptions: set[bytes] = set()
        self.overtaken: list[bytes] = []  # wait for the next message to go before them
        self._link = link

    def send_later(self, raw: bytes, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._send, [raw])

    def send_overtaken_soon(self) -> None:
        asyncio.get_running_loop().call_later(REORDER_MAX_S, self._send, self.overtaken)

    def _send(self, waiting: list[bytes]) -> None:
        server = self._link.server
        if server is not None and not server.is_closing():
            server.write(b"".join(waiting))
        waiting.clear()


class NatsProxy(Proxy):
    """Links are named as their clients are; one rule for messages at a time."""

    def __init__(self, url: str, *, listen: str = "") -> None:
        super().__init__(url, listen=listen, record=False)
        self.rule: MessageRule | None = None
        self._known: dict[Link, NatsLink] = {}

    @property
    def subscriptions(self) -> dict[str, int]:
        """How many subscriptions each live client holds, by its name."""
        return {
            link.name: len(self._known[link].subscriptions)
            for link in self.links
            if link in self._known and link.name
        }

    def pieces(self, link: Link, data: bytes) -> Iterable[bytes]:
        """Whole commands only, in one piece, so that nothing else gets between their halves."""
        self._known = {known: it for known, it in self._known.items() if known in self.links}
        state = self._known.setdefault(link, NatsLink(link))
        out: list[bytes] = []
        for command in state.commands.feed(data):
            self._note(link, state, command)
            if self.rule is None or not self.rule.matches(command):
                out.append(command.raw)
            elif self.rule.draws():
                out += self.rule.apply(state, command)
            else:
                out += [command.raw, *state.overtaken]
                state.overtaken.clear()
        return [b"".join(out)] if out else []

    def _note(self, link: Link, state: NatsLink, command: Command) -> None:
        match command.verb:
            case b"CONNECT":
                link.name = json.loads(command.raw[len(b"CONNECT ") :]).get("name", "")
            case b"SUB":
                state.subscriptions.add(command.args[-1])
            case b"UNSUB":
                state.subscriptions.discard(command.args[0])
