"""The tokenizer's answers: `Tokenized`, `Detokenized`, or `Failed` for the whole request."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from msgspec.structs import replace
from tokenizers import models, normalizers

from services.tokenizer.config import Config
from services.tokenizer.core import JOBS_MAX, SLICE, WIRE_MAX, TokenizerCore
from services.tokenizer.service import TokenizerActor
from shared.bus import Delivery
from shared.config import ConfigError, Launch
from shared.ids import pack_ids, unpack_ids
from shared.kv import BLOCK_SIZE, block_hashes
from shared.messages import (
    ChatPrompt,
    Detokenize,
    Detokenized,
    Failed,
    Generate,
    Message,
    Tokenized,
    encode,
)
from shared.model_files import default_model, read_model
from shared.sampling import SamplingDefaults
from shared.subjects import inbox
from shared.testing import MemoryBroker, MemoryBus, eventually, running
from tests.services.launches import launch_of

FILES = read_model(default_model())
CORE = TokenizerCore("tok-1", FILES, Config(max_prompts=4))


def ask(message: Generate | Detokenize) -> Message:
    CORE.receive(message, 0.0)
    [(subject, answer)] = CORE.outbox.take()
    assert subject == inbox("gw")
    return answer


def generate(**fields: Any) -> Generate:
    return Generate(request_id="r", attempt=3, gateway="gw", **fields)


def refused(message: Generate | Detokenize) -> Failed:
    answer = ask(message)
    assert isinstance(answer, Failed)
    assert (answer.request_id, answer.choice, answer.epoch) == ("r", -1, 3)
    assert not answer.retryable
    return answer


def test_texts_in_the_order_asked() -> None:
    """One entry per prompt, with the hashes of its full blocks and the try echoed."""
    long = "word " * 40
    answer = ask(generate(texts=["Hello", long], salt=b"s" * 32))
    assert isinstance(answer, Tokenized)
    assert (answer.attempt, answer.tokenizer) == (3, "tok-1")
    first, second = answer.prompts
    assert unpack_ids(first.prompt_ids) == [19556]
    assert first.block_hashes == b""
    ids = unpack_ids(second.prompt_ids)
    assert second.block_hashes == b"".join(block_hashes(ids, b"s" * 32))
    assert len(second.block_hashes) == len(ids) // BLOCK_SIZE * 16


def test_same_question_same_answer() -> None:
    """A duplicate is answered again, with the same bytes."""
    question = generate(chat=ChatPrompt(messages=[{"role": "user", "content": "hi"}]))
    assert encode(ask(question)) == encode(ask(question))


def test_ids_pass_as_they_are() -> None:
    answer = ask(generate(ids=[pack_ids([5, 49151])]))
    assert isinstance(answer, Tokenized)
    assert unpack_ids(answer.prompts[0].prompt_ids) == [5, 49151]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"texts": [""]}, "invalid_request", "prompt"),
        ({"texts": ["a", ""]}, "invalid_request", "prompt"),
        ({"texts": []}, "invalid_request", "prompt"),
        ({"texts": ["a"] * 5}, "invalid_request", "prompt"),
        ({}, "invalid_request", "prompt"),
        ({"ids": [b""]}, "invalid_request", "prompt"),
        ({"ids": [b"abc"]}, "invalid_request", "prompt"),
        ({"ids": [pack_ids([1, 49152])]}, "invalid_request", "prompt"),
        ({"ids": [pack_ids([2**32 - 1])]}, "invalid_request", "prompt"),
        ({"ids": [pack_ids([1] * 8193)]}, "context_length_exceeded", "prompt"),
        ({"texts": ["a b " * 8192]}, "context_length_exceeded", "prompt"),
        ({"chat": ChatPrompt(messages=[])}, "invalid_request", "messages"),
        (
            {"chat": ChatPrompt(messages=[{"role": "user", "content": 3}])},
            "invalid_request",
            "messages[0].content",
        ),
        (
            {"chat": ChatPrompt(messages=[{"role": "user", "content": "a b " * 8192}])},
            "context_length_exceeded",
            "messages",
        ),
    ],
)
def test_bad_input_is_answered_by_field(fields: dict[str, Any], code: str, param: str) -> None:
    """Every refusal says whose field it is; none of them raises."""
    failed = refused(generate(**fields))
    assert (failed.code, failed.param) == (code, param)


@pytest.mark.parametrize(
    ("words", "spellings"),
    [
        (["Paris"], {" Paris", "Paris"}),
        ([" Paris"], {" Paris", "Paris"}),
        (["Paris", "Paris", " Paris"], {" Paris", "Paris"}),
        (["\n"], {" \n", "\n"}),
        (["<|im_end|>"], {" <|im_end|>", "<|im_end|>"}),
        (["na\u00efve x", "a"], {" na\u00efve x", "na\u00efve x", " a", "a"}),
    ],
)
def test_bad_words_are_spelled_with_and_without_a_space(
    words: list[str], spellings: set[str]
) -> None:
    """Each way once, with no begin token before it; the ids are those of the text itself."""
    answer = ask(generate(texts=["x"], bad_words=words))
    assert isinstance(answer, Tokenized)
    ways = [unpack_ids(way) for way in answer.bad_words or []]
    assert {FILES.vocabulary.text(way, skip_special_tokens=False) for way in ways} == spellings
    assert len(ways) == len(spellings)


def test_a_bad_word_inside_a_text_is_spelled_without_the_space_of_its_beginning(
    tmp_path: Path,
) -> None:
    """SentencePiece vocabularies put a space before the first word of a text, and only there."""
    encoder = tokenizers.Tokenizer(
        models.BPE(
            vocab={t: n for n, t in enumerate(["<unk>", "\u2581", "\n", "a", "b", "\u2581a"])},
            merges=[("\u2581", "a")],
            unk_token="<unk>",
        )
    )
    encoder.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    encoder.save(str(tmp_path / "tokenizer.json"))
    config = {"model_type": "llama", "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    core = TokenizerCore("tok-1", read_model(tmp_path))
    core.receive(generate(ids=[pack_ids([3])], bad_words=["ab"]), 0.0)
    [(_, answer)] = core.outbox.take()

    assert isinstance(answer, Tokenized)
    assert [5, 4] in [unpack_ids(way) for way in answer.bad_words or []]
    assert [3, 4] in [unpack_ids(way) for way in answer.bad_words or []]


def test_the_models_sampling_defaults_ride_along() -> None:
    """A gateway holds no model files; it hears of them with the ids."""
    answer = ask(generate(texts=["x"]))
    assert isinstance(answer, Tokenized)
    assert answer.sampling_defaults == FILES.sampling_defaults == SamplingDefaults()
    recommended = SamplingDefaults(temperature=0.6, top_k=20)
    core = TokenizerCore("tok-1", replace(FILES, sampling_defaults=recommended))
    core.receive(generate(ids=[pack_ids([3])]), 0.0)
    [(_, answer)] = core.outbox.take()
    assert isinstance(answer, Tokenized)
    assert answer.sampling_defaults == recommended


def detokenize(ids: bytes, **fields: Any) -> Detokenize:
    return Detokenize(request_id="r", attempt=3, gateway="gw", ids=ids, **fields)


def test_detokenize() -> None:
    ids = pack_ids([1, 19556, 905, 2])
    answer = ask(detokenize(ids))
    assert isinstance(answer, Detokenized)
    assert answer.text == "<|im_start|>Hello world<|im_end|>"
    skipped = ask(detokenize(ids, skip_special_tokens=True))
    assert isinstance(skipped, Detokenized)
    assert skipped.text == "Hello world"
    assert refused(detokenize(pack_ids([49152]))).param == "tokens"
    assert refused(detokenize(b"abc")).param == "tokens"
    empty = ask(detokenize(b""))
    assert isinstance(empty, Detokenized)
    assert empty.text == ""


def test_a_text_beyond_the_wire_is_refused() -> None:
    """A text that the bus would not take is the client's mistake, and is answered."""
    longest = max(range(FILES.vocabulary.size), key=lambda i: len(FILES.vocabulary.raw(i)))
    count = WIRE_MAX // len(FILES.vocabulary.raw(longest)) + 1
    assert refused(detokenize(pack_ids([longest] * count))).param == "tokens"


# --- long questions ---

WORDS = "word " * (FILES.max_model_len - 2)  # one prompt that just fits


def slow_core() -> TokenizerCore:
    return TokenizerCore("tok-1", FILES)


def answers(core: TokenizerCore) -> list[Message]:
    return [envelope.message for envelope in core.outbox.take()]


def run(core: TokenizerCore, now: float = 0.0) -> list[Message]:
    """Tick until something is answered."""
    for _ in range(1000):
        core.tick(now)
        if found := answers(core):
            return found
    raise AssertionError("no answer")


def test_a_long_question_lets_others_go_first() -> None:
    """It is encoded in slices, is asked again without starting anew, and answered once, the same
    as in pieces."""
    core = slow_core()
    texts = [WORDS, "Hello", WORDS, WORDS]
    assert sum(map(len, texts)) > SLICE
    core.receive(generate(texts=texts), 0.0)
    assert answers(core) == []
    core.receive(replace(generate(texts=["Hello"]), request_id="other"), 0.0)
    [other] = answers(core)
    assert isinstance(other, Tokenized)
    core.receive(replace(generate(texts=texts), attempt=4), 0.0)
    [answer] = run(core)

    assert isinstance(answer, Tokenized)
    assert (answer.request_id, answer.attempt) == ("r", 4)
    assert answer.prompts[1] == other.prompts[0]
    assert answer.prompts[0] == answer.prompts[2] == answer.prompts[3]
    core.tick(0.0)
    assert answers(core) == []


def test_a_bad_prompt_in_a_long_question_is_refused() -> None:
    core = slow_core()
    core.receive(generate(texts=[WORDS, WORDS, WORDS, ""]), 0.0)
    [failed] = run(core)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.param) == ("invalid_request", "prompt")


def test_more_ids_than_the_wire_takes_are_refused() -> None:
    """Together with their block hashes; an answer that cannot be sent would be silence."""
    core = slow_core()
    core.receive(generate(ids=[pack_ids([1] * 8000)] * 200), 0.0)
    [failed] = run(core)
    assert isinstance(failed, Failed)
    assert "tokens together" in failed.detail


def test_a_long_question_ends_at_its_deadline() -> None:
    core = slow_core()
    core.receive(generate(texts=[WORDS] * 4, deadline_ms=1000), 10.0)
    [failed] = run(core, 11.1)
    assert isinstance(failed, Failed)
    assert failed.code == "deadline_exceeded"


def test_long_questions_are_bounded() -> None:
    core = slow_core()
    question = generate(ids=[pack_ids([1] * 8000)] * 10)
    for number in range(JOBS_MAX + 1):
        core.receive(replace(question, request_id=f"r{number}"), 0.0)
    [failed] = answers(core)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retry_after_s) == ("overloaded", 1.0)


def launch(**settings: Any) -> Launch:
    return launch_of("tokenizer", "tok-1", settings, model=str(default_model()))


async def test_actor_answers_over_the_bus() -> None:
    """A question on its inbox comes back to the gateway that it names."""
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    heard: list[Delivery] = []
    await bus.subscribe(inbox("gw"), heard.append)
    async with running(TokenizerActor(launch(), MemoryBus(broker))):
        bus.publish(inbox("tok-1"), encode(generate(texts=["Hello"])))
        await eventually(lambda: bool(heard))
    CORE.receive(generate(texts=["Hello"]), 0.0)
    [(_, expected)] = CORE.outbox.take()
    assert heard[0].payload == encode(expected)


async def test_a_stopped_actor_answers_what_was_asked() -> None:
    """A question that takes many turns, and one that comes when it has been told to stop."""
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    heard: list[Tokenized] = []
    decoder = msgspec.msgpack.Decoder(Tokenized)
    await bus.subscribe(
        inbox("gw"), lambda delivery: heard.append(decoder.decode(delivery.payload))
    )
    async with running(TokenizerActor(launch(), MemoryBus(broker))) as actor:
        long = [" ".join(["whale"] * (SLICE // 24))] * 20
        bus.publish(inbox("tok-1"), encode(generate(texts=long)))
        await eventually(lambda: actor.handled == 1)
        assert heard == []
        actor.stop()
        await eventually(lambda: actor.draining)
        bus.publish(inbox("tok-1"), encode(replace(generate(texts=["Hello"]), request_id="late")))
    assert {(found.request_id, len(found.prompts)) for found in heard} == {("r", 20), ("late", 1)}


def test_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="cpu_ms"):
        TokenizerActor(launch(cpu_ms=3), MemoryBus(MemoryBroker()))
