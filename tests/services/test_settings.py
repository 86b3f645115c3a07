"""What services may be told: a typo or a number that makes no sense is refused by its name."""

from typing import Any

import msgspec
import pytest

from services.detokenizer.config import Config as Detokenizer
from services.gateway.config import GatewayConfig
from services.gpu_worker.config import SimConfig, WorkerConfig
from services.kv_tier.config import Config as KvTier
from services.scheduler.config import SchedulerConfig
from services.tokenizer.config import Config as Tokenizer
from shared.breaker import Limits
from shared.config import ConfigError, settings

KINDS: list[type[Any]] = [
    *(GatewayConfig, Tokenizer, SchedulerConfig, WorkerConfig, SimConfig),
    *(KvTier, Limits, Detokenizer),
]
MARKER = "_id"
"""How a setting ends that a prompt is compared with: an id that none has is as good as none."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_has_a_bound(kind: type[Any]) -> None:
    """No count and no duration may be negative."""
    fields = msgspec.structs.fields(kind)
    numbers = [f.name for f in fields if isinstance(f.default, int | float) or f.default is None]
    assert numbers
    for name in numbers:
        if name.endswith(MARKER):
            continue
        with pytest.raises(ConfigError, match=rf"\[role\].*{name}"):
            settings({name: -1}, kind, "role")


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_is_named(kind: type[Any]) -> None:
    with pytest.raises(ConfigError, match=r"\[role\].*no_such_key"):
        settings({"no_such_key": 1}, kind, "role")


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_are_within_bounds(kind: type[Any]) -> None:
    settings(msgspec.to_builtins(kind()), kind, "role")
