"""The wire does not change under those who speak it: golden bytes of every message.

Field evolution is append-only. `golden_messages.json` holds, per message, the bytes of every
version of its example, oldest first. After adding a field or a message, give it a place in the
examples and run `python -m tests.shared.test_messages`, which appends and never rewrites.
"""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from shared import messages as m
from shared.sampling import SamplingDefaults, SamplingParams, TextParams

GOLDEN = Path(__file__).with_name("golden_messages.json")
ID = "00112233445566778899aabbccddeeff"
LEG: dict[str, Any] = {"request_id": ID, "choice": 1, "epoch": 2}
IDS = b"\x01\x00\x00\x00\x02\x00\x00\x00"

SAMPLING = SamplingParams(
    max_tokens=7,
    seed=2**64 - 1,
    temperature=0.5,
    top_k=40,
    top_p=0.9,
    min_p=0.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    logit_bias={5: -1.0},
    min_tokens=1,
    stop_token_ids=(3, 4),
    ignore_eos=True,
    logprobs=2,
    bad_words=((5,), (6, 7)),
    allowed_token_ids=(1, 2),
    prompt_logprobs=1,
)
TEXT = TextParams(stop=("a", "b"), include_stop_str=True, skip_special_tokens=False, min_tokens=1)
SUBMIT = m.Submit(
    **LEG,
    gateway="g",
    model="model",
    tenant="t",
    prompt_ids=IDS,
    sampling=SAMPLING,
    text=TEXT,
    output_ids=IDS,
    block_hashes=b"h" * 16,
    salt=b"s",
    priority=-1,
    last_worker="w",
    alone=True,
    deadline_ms=1000,
    failed_worker="w",
    pin=True,
)
CHAT = m.ChatPrompt(
    messages=[{"role": "user", "content": "hi"}],
    tools=[{"type": "function"}],
    add_generation_prompt=False,
    continue_final_message=True,
    template_kwargs={"k": 1},
)
LOGPROBS = [m.TokenLogprobs(-0.5, IDS, (-0.5, -1.5))]
EXAMPLES: list[m.Message] = [
    m.Generate(
        request_id=ID,
        attempt=1,
        gateway="g",
        chat=CHAT,
        texts=["x"],
        ids=[IDS],
        add_special_tokens=False,
        salt=b"s",
        deadline_ms=10,
        bad_words=["y"],
    ),
    m.Tokenized(
        request_id=ID,
        attempt=1,
        tokenizer="t",
        prompts=[m.TokenizedPrompt(IDS, b"h" * 16)],
        bad_words=[IDS],
        sampling_defaults=SamplingDefaults(
            temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.1
        ),
    ),
    m.Detokenize(request_id=ID, attempt=1, gateway="g", ids=IDS, skip_special_tokens=True),
    m.Detokenized(request_id=ID, attempt=1, tokenizer="t", text="é"),
    SUBMIT,
    m.Accepted(**LEG, scheduler="s", term=3),
    m.NotLeader(**LEG, scheduler="s", term=3, leader="l"),
    m.Run(submit=SUBMIT, scheduler="s", term=3, detokenizer="d"),
    m.Started(**LEG, worker="w", detokenizer="d", num_cached_tokens=16, adopted=True),
    m.StepDone(
        worker="w",
        step=9,
        records=[
            m.StepRecord(
                ID,
                1,
                2,
                "g",
                3,
                IDS,
                "stop",
                LOGPROBS,
                m.TextContext(IDS, IDS, TEXT, True),
                m.PromptLogprobs(IDS, LOGPROBS, [1]),
            )
        ],
    ),
    m.Ended(worker="w", legs=[m.EndedLeg(ID, 1, 2, "length", 5)]),
    m.TextDelta(
        detokenizer="d",
        records=[
            m.TextRecord(
                ID,
                1,
                2,
                3,
                IDS,
                "text",
                "stop",
                "b",
                [m.TokenText(-0.5, "t", b"t", [("t", b"t", -0.5)])],
                [m.PromptToken(1, "t", b"t", -0.5, 1, [(1, "t", b"t", -0.5)])],
            )
        ],
    ),
    m.Cancel(**LEG, reason="stop_string"),
    m.Failed(
        **LEG,
        code="overloaded",
        detail="full",
        retryable=True,
        started=True,
        param="n",
        retry_after_s=1.5,
    ),
    m.RouteLost(**LEG, reason="gap", term=3),
    m.Lost(instance="w", scheduler="s", term=3, hung=True),
    m.Renew(gateway="g", legs=[m.RenewLeg(ID, 1, 2, 3)]),
    m.Renewed(holder="s", legs=[m.RenewedLeg(ID, 1, 2, "placed", 3, "w", "d")]),
    m.Beat(
        instance="w",
        role="gpu_worker",
        seq=1,
        ready=False,
        draining=True,
        term=2,
        model="m",
        load=3,
        waiting=4,
        step=5,
        phase="decode",
        phase_age_ms=6,
        phase_bound_ms=7,
        free_blocks=8,
        total_blocks=9,
        block_size=16,
        max_legs=10,
        max_model_len=11,
        prefill_tokens_waiting=12,
        step_tokens=13,
        engine_seconds={"attention": 1.5},
        host="boot",
        pid=14,
        engine_counts={"preemptions": 15},
        kv_policy="window=64",
        leg_blocks_max=15,
    ),
    m.Beacon(
        scheduler="s",
        term=3,
        pool="p",
        model="m",
        workers=2,
        max_model_len=2048,
        queued=4,
        resigning=True,
        kv_policy="window=64",
    ),
    m.Died(instance="w", reason="signal 9"),
    m.LookupBlocks(
        lookup_id=1,
        worker="w",
        block_hashes=b"h" * 16,
        fingerprint=b"f" * 16,
        lent=m.Lent(2, 3, 4, 5),
        slots=[6],
        min_blocks=7,
        deadline_ms=8,
    ),
    m.BlocksFound(lookup_id=1, kv_tier="k", num_blocks=2, num_loaded=1),
    m.StoreBlocks(
        store_id=1,
        worker="w",
        block_hashes=b"h" * 16,
        fingerprint=b"f" * 16,
        lent=m.Lent(2, 3, 4, 5),
        slots=[6],
        dtype="bf16",
        used=b"u" * 16,
    ),
    m.BlocksStored(store_id=1, kv_tier="k", num_blocks=2),
    m.ReturnSlots(worker="w", lent=m.Lent(2, 3, 4, 5), generations=[1], slots=[[6]]),
    m.BlocksChanged(worker="w", seq=1, added=b"a" * 8, removed=b"r" * 8, whole=True),
    m.AskBlocks(scheduler="s"),
]
BY_NAME = {type(example).__name__: example for example in EXAMPLES}
MAILBOXES = (
    m.ToTokenizer,
    m.ToScheduler,
    m.ToWorker,
    m.ToDetokenizer,
    m.ToKvTier,
    m.ToGateway,
)


def golden() -> dict[str, list[str]]:
    loaded: dict[str, list[str]] = json.loads(GOLDEN.read_text())
    return loaded


def leaves(kind: type[m.Message]) -> set[str]:
    """Names of all messages that are sent."""
    below = kind.__subclasses__()
    return set().union(*map(leaves, below)) if below else {kind.__name__}


def test_every_message_has_an_example() -> None:
    """A message without golden bytes could change unseen."""
    assert leaves(m.Message) == set(BY_NAME) == set(golden())


@pytest.mark.parametrize("name", BY_NAME)
def test_bytes_of_every_version_still_read_the_same(name: str) -> None:
    """What any earlier version wrote decodes to the same fields; new ones take their defaults."""
    example = BY_NAME[name]
    decoder = msgspec.msgpack.Decoder(type(example))
    *older, newest = [bytes.fromhex(text) for text in golden()[name]]
    assert decoder.decode(newest) == example
    assert m.encode(example) == newest, "run `python -m tests.shared.test_messages`"
    for old in older:
        decoder.decode(old)


@pytest.mark.parametrize("name", BY_NAME)
def test_examples_set_every_field(name: str) -> None:
    """A field left at its default is not on the wire, so the golden bytes would not hold it."""
    for part in parts(BY_NAME[name]):
        for field in msgspec.structs.fields(part):
            if field.default is not msgspec.NODEFAULT:
                assert getattr(part, field.name) != field.default, f"{type(part)}.{field.name}"


def parts(value: Any) -> list[msgspec.Struct]:
    """`value` and every struct inside it."""
    if isinstance(value, msgspec.Struct):
        inner = [getattr(value, name) for name in value.__struct_fields__]
        return [value, *(part for each in inner for part in parts(each))]
    if isinstance(value, list | tuple):
        return [part for each in value for part in parts(each)]
    return []


@pytest.mark.parametrize("mailbox", MAILBOXES, ids=lambda union: str(union)[:40])
def test_a_mailbox_tells_its_messages_apart(mailbox: Any) -> None:
    """One decoder per mailbox gives each message its own type."""
    decoder = msgspec.msgpack.Decoder(mailbox)
    for kind in get_args(mailbox) or (mailbox,):
        example = BY_NAME[kind.__name__]
        assert decoder.decode(m.encode(example)) == example


def test_fields_of_a_newer_sender_are_ignored() -> None:
    """A reader that is one version behind goes on."""
    fields = msgspec.msgpack.decode(m.encode(BY_NAME["Died"]))
    fields["since_s"] = 1.5
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=m.Died) == BY_NAME["Died"]
    renew = msgspec.msgpack.decode(m.encode(BY_NAME["Renew"]))
    renew["legs"][0].append("new")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(renew), type=m.Renew) == BY_NAME["Renew"]


def test_a_message_of_another_mailbox_is_refused() -> None:
    """A message that a mailbox does not name never reaches its core."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(m.encode(BY_NAME["Beacon"]), type=m.ToDetokenizer)


if __name__ == "__main__":
    known = golden() if GOLDEN.exists() else {}
    for example_name, each in BY_NAME.items():
        versions = known.setdefault(example_name, [])
        if m.encode(each).hex() not in versions[-1:]:
            versions.append(m.encode(each).hex())
    GOLDEN.write_text(json.dumps(known, indent=1) + "\n")
