"""The proxies do what a round says they did, to the traffic it says, and nothing else."""

import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.servers import Server
from shared.nats_bus import NatsBus
from shared.testing import eventually
from tests.chaos.nats_proxy import Commands, LethalRule, MessageRule, NatsProxy, Verb
from tests.shared.proxy import Direction, Proxy, Weather

CLIENT = [
    b'CONNECT {"name":"me"}\r\n',
    b"SUB a.> 1\r\n",
    b"PUB a.b 5\r\nhello\r\n",
    b"PUB a.b _INBOX.1 8\r\n\r\nPUB \r\n\r\n",
    b"HPUB a.c 12 14\r\nNATS/1.0\r\n\r\nhi\r\n",
    b"PUB a.b 0\r\n\r\n",
    b"PING\r\n",
    b"UNSUB 1\r\n",
]


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, sum(map(len, CLIENT))), max_size=12))
def test_commands_are_found_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    """Payloads that look like commands are not taken for them."""
    data, commands = b"".join(CLIENT), Commands()
    edges = [0, *sorted(cuts), len(data)]
    found = [
        command
        for start, end in itertools.pairwise(edges)
        for command in commands.feed(data[start:end])
    ]
    assert [command.raw for command in found] == CLIENT
    assert [command.subject for command in found] == ["", "", "a.b", "a.b", "a.c", "a.b", "", ""]


class Line:
    """A sender named `sender-0` behind the proxy, and what a receiver past it heard."""

    def __init__(self, proxy: NatsProxy, sender: NatsBus) -> None:
        self.proxy = proxy
        self.sender = sender
        self.heard: list[str] = []

    def send(self, *words: str) -> None:
        for word in words:
            self.sender.publish("to.somebody", word.encode())

    async def hears(self, count: int) -> list[str]:
        await eventually(lambda: len(self.heard) >= count, what=f"{count} messages")
        return self.heard


@pytest.fixture
async def line(nats_server: Server) -> AsyncIterator[Line]:
    server = nats_server
    async with contextlib.AsyncExitStack() as stack:
        proxy = NatsProxy(server.url)
        await stack.enter_async_context(proxy)
        sender = await NatsBus.connect(proxy.url, server.user, server.password, name="sender-0")
        stack.push_async_callback(sender.close)
        receiver = await NatsBus.connect(server.url, server.user, server.password, name="receiver")
        stack.push_async_callback(receiver.close)
        line = Line(proxy, sender)
        await receiver.subscribe("*.somebody", lambda it: line.heard.append(it.payload.decode()))
        yield line


@pytest.mark.parametrize(
    ("verb", "heard"),
    [
        ("drop", []),
        ("duplicate", ["1", "1", "2", "2"]),
        ("delay", ["1", "2"]),
        ("reorder", ["1", "2"]),  # nothing overtakes, so they go on after a while
    ],
)
async def test_a_rule_hits_messages_of_its_subjects_only(
    line: Line, verb: Verb, heard: list[str]
) -> None:
    """What it hits it counts; others, and all after it is gone, pass."""
    line.proxy.rule = rule = MessageRule(verb, "to.*", share=1.0, seed=1, delay_s=0.05)
    line.send("1", "2")
    line.sender.publish("from.somebody", b"other")
    await line.sender.flush()
    await eventually(lambda: sorted(line.heard) == sorted([*heard, "other"]))
    assert rule.hits == 2

    line.proxy.rule = None
    line.send("3")
    assert (await line.hears(len(heard) + 2))[-1] == "3"


async def test_a_lethal_message_reaches_nobody_and_names_its_reader(line: Line) -> None:
    """Other messages to the same reader pass."""
    ended: list[str] = []
    line.proxy.rule = rule = LethalRule("to.*", b"poison", ended.append)
    line.send("well", "with poison in it", "and well")
    assert await line.hears(2) == ["well", "and well"]
    assert (rule.hits, ended) == (1, ["somebody"])


async def test_a_share_of_messages_is_hit_the_same_ones_for_a_seed(line: Line) -> None:
    """A lost message is lost alone; the same seed loses the same ones again."""
    words = [str(number) for number in range(40)]
    kept = []
    for _ in range(2):
        line.heard.clear()
        line.proxy.rule = MessageRule("drop", "to.*", share=0.5, seed=7)
        line.send(*words)
        line.sender.publish("from.somebody", b"end")
        await eventually(lambda: line.heard[-1:] == ["end"])
        kept.append(line.heard[:-1])
    assert kept[0] == kept[1]
    assert 0 < len(kept[0]) < 40


async def test_a_message_is_overtaken_by_the_next_of_its_kind(line: Line) -> None:
    """Order changes, and nothing is lost."""
    line.proxy.rule = MessageRule("reorder", "to.*", share=0.5, seed=3)
    words = [str(number) for number in range(40)]
    line.send(*words)
    heard = await line.hears(40)
    assert heard != words
    assert sorted(heard) == sorted(words)


@pytest.mark.parametrize("direction", ["sent", "received"])
async def test_what_is_held_flows_on_when_the_weather_clears(
    line: Line, direction: Direction
) -> None:
    """One way only, of the links that it is about only."""
    line.proxy.weather = elsewhere = Weather("somebody-else", held=["sent", "received"])
    line.send("1")
    await line.hears(1)
    assert elsewhere.touched == 0

    line.proxy.weather = weather = Weather("sender-", held=[direction])
    line.send("2")
    line.sender._client.queue(b"PING\r\n")  # for the other way: an answer to hold
    await eventually(lambda: weather.touched > 0)
    assert line.heard == (["1"] if direction == "sent" else ["1", "2"])
    weather.clear()
    await line.hears(2)


async def test_a_cut_comes_in_the_middle_of_a_frame(line: Line) -> None:
    """Half a message is never a message; the client connects again and goes on."""
    line.proxy.weather = weather = Weather("sender-", cuts=1)
    line.send("a long word")
    await eventually(lambda: line.sender.reconnects == 1)
    assert weather.cuts == 0
    line.send("again")
    assert await line.hears(1) == ["again"]


async def test_links_have_names_and_subscriptions(line: Line) -> None:
    """What a leak is judged by: unsubscribed ones are gone, links that ended too."""
    inbox = line.proxy.subscriptions["sender-0"]
    subscription = await line.sender.subscribe("x", lambda _: None)
    assert line.proxy.subscriptions == {"sender-0": inbox + 1}
    await subscription.unsubscribe()
    await eventually(lambda: line.proxy.subscriptions == {"sender-0": inbox})
    assert line.proxy.cut("nobody") == 0
    await line.sender.close()
    await eventually(lambda: line.proxy.subscriptions == {})


async def test_a_unix_socket_is_proxied_too(redis_server: Server, tmp_path: Path) -> None:
    """As Redis has it."""
    from redis.asyncio import Redis  # noqa: PLC0415 beside the one test that needs it

    path = tmp_path / "proxy.sock"
    target = f"unix://{redis_server.run_dir / 'redis.sock'}"
    async with (
        Proxy(target, listen=f"unix://{path}", record=False) as proxy,
        Redis(unix_socket_path=str(path), password=redis_server.password) as redis,
    ):
        assert await redis.ping()
        assert len(proxy.links) == 1
        proxy.weather = Weather(latency_s=0.01)
        assert await redis.ping()
        assert proxy.weather.touched > 0
    assert not path.exists()
