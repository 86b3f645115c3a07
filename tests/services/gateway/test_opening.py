"""What a session fixes at its opening, and keeps over every re-drive."""

from typing import Any

import pytest

from services.gateway.events import SessionSpec
from services.gateway.opening import PROMPT_LOGPROBS_MAX, sampling_of_choices
from shared.errors import InvalidRequest, MeshError, Unavailable
from shared.ids import pack_ids
from shared.messages import ChatPrompt, Submit, Tokenized, TokenizedPrompt
from shared.sampling import SamplingDefaults, SamplingParams
from tests.services.gateway.fake_mesh import Front
from tests.services.gateway.session_rig import R, Rig

DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.2)


def spec(prompts: int = 1, sampling: dict[str, Any] | None = None, **fields: Any) -> SessionSpec:
    if "chat" not in fields:
        fields["texts"] = ["x"] * prompts
    params = SamplingParams(max_tokens=0, **sampling or {})
    return SessionSpec(request_id=R, model="m", max_tokens=1, sampling=params, **fields)


def told(*prompts: list[int], **fields: Any) -> Tokenized:
    entries = [TokenizedPrompt(pack_ids(ids)) for ids in prompts or ([7, 8],)]
    return Tokenized(request_id=R, attempt=1, tokenizer="t0", prompts=entries, **fields)


def opened(request: SessionSpec, answer: Tokenized) -> list[SamplingParams]:
    return sampling_of_choices(request, answer, 100_000, seed=1)


@pytest.mark.parametrize("left", [(), ("temperature",), SamplingDefaults.__struct_fields__])
def test_the_models_defaults_fill_what_the_request_left_open(left: tuple[str, ...]) -> None:
    """Only fields that were not said take the model's value, and only where it has one."""
    [sampling] = opened(spec(unsaid=left), told(sampling_defaults=DEFAULTS))
    plain = SamplingParams(max_tokens=1)
    for name in SamplingDefaults.__struct_fields__:
        assert getattr(sampling, name) == getattr(DEFAULTS if name in left else plain, name)
    [sampling] = opened(spec(unsaid=left), told(sampling_defaults=SamplingDefaults()))
    assert sampling.temperature == 1.0
    [sampling] = opened(spec(unsaid=left), told())
    assert sampling.temperature == 1.0


def test_a_resume_draws_by_the_same_defaults() -> None:
    """What the first epoch was given is what every later one gets."""
    rig = Rig()
    rig.open(unsaid=("temperature",), bad_words=["x"])
    rig.say(told(sampling_defaults=DEFAULTS, bad_words=[pack_ids([5]), pack_ids([6, 7])]))
    [(_, first)] = rig.sent(Submit)
    rig.start()
    rig.text(1, 0, [1])
    rig.text(1, 2, [3])  # a gap
    again = rig.resubmitted()

    assert first.sampling.temperature == 0.6
    assert first.sampling.bad_words == ((5,), (6, 7))
    assert (again.epoch, again.sampling) == (2, first.sampling)


def test_a_tokenizer_that_knows_no_bad_words_is_not_trusted_with_them() -> None:
    """An older one answers without them; the words would be said after all."""
    with pytest.raises(Unavailable):
        opened(spec(bad_words=["x"]), told())


def test_another_number_of_prompts_is_refused() -> None:
    """Choices would be given to the wrong prompts."""
    with pytest.raises(MeshError):
        opened(spec(prompts=2), told([1]))


@pytest.mark.parametrize(
    ("prompts", "n", "count", "fits"),
    [
        ([PROMPT_LOGPROBS_MAX], 1, 0, True),
        ([PROMPT_LOGPROBS_MAX + 1], 1, 0, False),
        ([PROMPT_LOGPROBS_MAX // 4], 1, 3, True),
        ([PROMPT_LOGPROBS_MAX // 4], 1, 4, False),
        ([PROMPT_LOGPROBS_MAX // 4], 2, 1, True),
        ([PROMPT_LOGPROBS_MAX // 4] * 3, 1, 1, False),
        ([PROMPT_LOGPROBS_MAX + 1], 1, None, True),
    ],
)
def test_prompt_logprobs_fit_the_bus(
    prompts: list[int], n: int, count: int | None, fits: bool
) -> None:
    """Ids x choices x (alternatives + 1) have a bound, and the field at fault is named."""
    request = spec(
        len(prompts), n=n, sampling={"prompt_logprobs": count}, prompt_logprobs_field="logprobs"
    )
    answer = told(*([1] * size for size in prompts))
    if fits:
        wanted = {sampling.prompt_logprobs for sampling in opened(request, answer)}
        assert wanted == {count}
        return
    with pytest.raises(InvalidRequest) as caught:
        opened(request, answer)
    assert caught.value.param == "logprobs"


def test_a_chat_asks_for_its_prompt_once() -> None:
    """All choices have the same prompt; one of them brings its log probabilities."""
    request = spec(chat=ChatPrompt(messages=[]), n=3, sampling={"prompt_logprobs": 1})
    assert [s.prompt_logprobs for s in opened(request, told([1] * 30_000))] == [1, None, None]


async def test_a_request_over_http_gets_the_models_defaults(edge: Front) -> None:
    """What the tokenizer says of the model reaches the worker, unless the client says otherwise;
    so do the ids of bad words and the allowed ids.
    """
    edge.mesh.script.sampling_defaults = DEFAULTS
    said = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    more = {"bad_words": ["ab", "c"], "allowed_token_ids": [5, 6]}
    bodies: list[dict[str, Any]] = [{}, {"temperature": 0}, said, more]
    for body in bodies:
        status, answer, _ = await edge.post("/v1/completions", {"prompt": "x", **body})
        assert status == 200, answer

    none, one, every, lists = [submit.sampling for submit in edge.mesh.submitted]
    names = SamplingDefaults.__struct_fields__
    assert [getattr(none, name) for name in names] == [0.6, 0.9, 20, 0.1, 1.2]
    assert [getattr(one, name) for name in names] == [0, 0.9, 20, 0.1, 1.2]
    assert [getattr(every, name) for name in names] == [1, 1, 0, 0, 1]
    assert lists.bad_words == ((ord("a"), ord("b")), (ord("c"),))
    assert lists.allowed_token_ids == (5, 6)
