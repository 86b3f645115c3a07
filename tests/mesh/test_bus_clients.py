"""Other systems on the bus: no line of our Python, only NATS and JSON."""

import asyncio
import json
from typing import Any

from tests.mesh.cluster import Mesh


async def test_an_outsider_submits_json_and_reads_the_stream(mesh: Mesh) -> None:
    """A NATS client that knows nothing of the project gets numbered frames to its inbox."""
    client = await mesh.outsider()
    inbox = client.new_inbox()
    frames = await client.subscribe(inbox)
    body = {
        "model": mesh.model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 24,
        "stream": True,
    }
    await client.publish("shoal.v1.generate", json.dumps(body).encode(), reply=inbox)

    read: list[dict[str, Any]] = []
    while not read or read[-1]["event"] not in ("done", "error"):
        message = await frames.next_msg(timeout=60)
        if message.data:  # else the liveness probe, which nobody need answer
            read.append(json.loads(message.data))
    await client.close()

    assert [frame["index"] for frame in read] == list(range(len(read)))
    assert read[-1]["event"] == "done"
    chunks = [frame["data"] for frame in read if frame["event"] == "chunk"]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert "Paris" in text


async def test_bad_json_from_an_outsider_is_answered(mesh: Mesh) -> None:
    """A body that is no JSON comes back as one error frame."""
    client = await mesh.outsider()
    inbox = client.new_inbox()
    frames = await client.subscribe(inbox)
    await client.publish("shoal.v1.generate", b"{", reply=inbox)
    frame = json.loads((await frames.next_msg(timeout=10)).data)
    await client.close()

    assert frame["event"] == "error"
    assert frame["data"]["error"]["type"] == "invalid_request_error"


async def test_an_outsider_that_vanishes_is_cancelled(mesh: Mesh) -> None:
    """When nobody listens at the inbox any more, generation ends and its blocks are free."""
    client = await mesh.outsider()
    inbox = client.new_inbox()
    frames = await client.subscribe(inbox)
    body = {
        "model": mesh.model,
        "messages": [{"role": "user", "content": "Count to a million."}],
        "max_tokens": 8000,
        "ignore_eos": True,
        "stream": True,
    }
    await client.publish("shoal.v1.generate", json.dumps(body).encode(), reply=inbox)
    await frames.next_msg(timeout=60)
    await client.close()

    await mesh.quiet()


async def test_outsiders_cannot_touch_the_internal_subjects(mesh: Mesh) -> None:
    """The public account hears nothing of `mesh.v1.>`, and what it says there reaches nobody."""
    client = await mesh.outsider()
    heard: list[str] = []

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    for subject in ("mesh.v1.>", "mesh.v1.beat.>", ">"):
        await client.subscribe(subject, cb=hear)
    insider = await mesh.insider()
    died = await insider.subscribe("mesh.v1.died")
    await insider.flush()
    await client.publish("mesh.v1.died", b"forged")
    await client.flush()
    await insider.publish("mesh.v1.died", b"ours")
    assert (await died.next_msg(timeout=10)).data == b"ours", "and nothing before it"
    async with asyncio.timeout(120):  # a request of ours makes internal traffic for certain
        await mesh.post("/v1/completions", {"prompt": "x", "max_tokens": 4})
    await client.flush()
    assert died.pending_msgs == 0, "nor after it"
    await client.close()
    await insider.close()

    assert not [subject for subject in heard if subject.startswith("mesh.")]
