"""Strict classes that age, fair shares between tenants, earliest deadline inside one."""

import random
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.fairness import FairQueue, Waiting


def leg(**fields: Any) -> Waiting:
    defaults: dict[str, Any] = {
        "priority": 0,
        "tenant": "t",
        "tokens": 10,
        "deadline": float("inf"),
        "arrived": 0.0,
    }
    return Waiting(**defaults | fields)


def drain(queue: FairQueue[Waiting], now: float, count: int = 10**6) -> list[Waiting]:
    served = []
    while len(served) < count and (first := queue.first(now)) is not None:
        queue.charge(first)
        served.append(first)
    return served


def filled(legs: list[Waiting], **weights: float) -> FairQueue[Waiting]:
    queue = FairQueue[Waiting](aging_s=10.0, weights=weights)
    for each in legs:
        queue.add(each)
    return queue


def test_a_lower_class_waits_for_every_leg_of_a_higher_one() -> None:
    """Bands are strict while nobody has waited long."""
    low, high = [leg(priority=1) for _ in range(3)], [leg(priority=0) for _ in range(3)]
    assert drain(filled(low + high), 1.0) == high + low


def test_waiting_lifts_a_class_so_that_none_starves() -> None:
    """After `aging_s` per class the oldest leg of the lower class goes first."""
    old, new = leg(priority=1, arrived=0.0), leg(priority=0, arrived=19.0)
    assert filled([old, new]).first(9.0) is new
    assert filled([old, new]).first(20.5) is old


def test_a_class_that_waits_alone_is_still_shared_fairly() -> None:
    """Age is between classes: with one class only, a flood does not become first come."""
    flood = [leg(tenant="a", arrived=0.0) for _ in range(10)]
    other = leg(tenant="b", arrived=5.0)
    assert other in drain(filled([*flood, other]), 100.0, count=2)


def test_redrives_go_before_new_work_of_their_class_only() -> None:
    """A client in mid-sentence waits for nobody of its class, but for every higher class."""
    high, new, again = leg(), leg(priority=1), leg(priority=1, redrive=True)
    assert drain(filled([new, again, high]), 1.0) == [high, again, new]


def test_tenants_share_by_tokens_and_not_by_requests() -> None:
    """A tenant with long prompts gets as many tokens as one with short prompts."""
    legs = [leg(tenant="long", tokens=100) for _ in range(50)]
    legs += [leg(tenant="short", tokens=10) for _ in range(500)]
    tokens = Counter[str]()
    for each in drain(filled(legs), 1.0, count=220):
        tokens[each.tenant] += each.tokens
    assert abs(tokens["long"] - tokens["short"]) <= 100


def test_a_weight_of_two_is_twice_the_share() -> None:
    """Weights scale the tokens a tenant is given while all of them wait."""
    legs = [leg(tenant=name) for name in ("a", "b") for _ in range(200)]
    served = Counter(each.tenant for each in drain(filled(legs, a=2.0), 1.0, count=150))
    assert abs(served["a"] - 2 * served["b"]) <= 3


def test_a_tenant_that_was_away_has_saved_nothing_up() -> None:
    """Its first leg goes at once, and then it takes turns."""
    queue = filled([leg(tenant="a") for _ in range(100)])
    drain(queue, 1.0, count=50)
    for _ in range(50):
        queue.add(leg(tenant="b"))
    served = Counter(each.tenant for each in drain(queue, 1.0, count=40))
    assert abs(served["a"] - served["b"]) <= 2


def test_inside_a_tenant_the_earliest_deadline_goes_first() -> None:
    """A deadline orders a tenant's own legs, never those of two tenants."""
    late, soon = leg(deadline=60.0), leg(deadline=5.0)
    assert drain(filled([late, soon]), 1.0) == [soon, late]


@given(st.integers(0, 2**32))
def test_every_leg_leaves_exactly_once(seed: int) -> None:
    """Whatever is added, removed and served: nothing is lost, doubled or served after removal."""
    rng = random.Random(seed)
    queue = FairQueue[Waiting](aging_s=2.0, weights={"a": 3.0})
    inside: list[Waiting] = []
    for step in range(120):
        action = rng.random()
        if action < 0.5:
            new = leg(
                priority=rng.randint(0, 2),
                tenant=rng.choice("abc"),
                tokens=rng.randint(1, 50),
                deadline=rng.choice([float("inf"), rng.uniform(0, 50)]),
                arrived=step * 0.1,
                redrive=rng.random() < 0.2,
            )
            queue.add(new)
            inside.append(new)
        elif action < 0.65 and inside:
            gone = inside.pop(rng.randrange(len(inside)))
            queue.remove(gone)
            queue.remove(gone)
        elif (first := queue.first(step * 0.1)) is not None:
            queue.charge(first)
            inside.remove(first)
        assert len(queue) == len(inside)
    left = drain(queue, 1000.0)
    assert len(left) == len(inside)
    assert set(map(id, left)) == set(map(id, inside))
