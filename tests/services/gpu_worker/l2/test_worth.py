"""When a load is worth it, by what loads and prompt ids took."""

from services.gpu_worker.l2.worth import Worth

ID_S = 0.0003  # of the default model in int8


def measured(fixed_s: float, per_block_s: float, floor: int = 8) -> Worth:
    worth = Worth(floor, block_size=16)
    for _ in range(10):
        worth.loaded(0, fixed_s, undisturbed=True)
        worth.loaded(100, fixed_s + 100 * per_block_s, undisturbed=True)
    return worth


def test_before_anything_is_known_the_floor_decides() -> None:
    worth = Worth(8, block_size=16)
    assert worth.min_blocks(0.0, 0.0) == 8
    assert worth.min_blocks(ID_S, 0.0) == 8


def test_the_longer_the_way_the_longer_a_prefix_must_be() -> None:
    """A load must be 1.5 times faster: 1.5 (fixed + n per_block) <= n * 16 ids."""
    assert measured(0.002, 0.0005).min_blocks(ID_S, 0.0) == 8
    assert measured(0.100, 0.0005).min_blocks(ID_S, 0.0) == 38


def test_a_load_that_is_never_faster_is_tried_now_and_then() -> None:
    """Every 10 s, since what it takes may have changed; then it is asked for again."""
    worth = measured(0.002, 0.005)
    assert worth.min_blocks(ID_S, 100.0) == 8
    worth.asked(100.0)
    assert worth.min_blocks(ID_S, 105.0) is None
    assert worth.min_blocks(ID_S, 110.0) == 8
    for _ in range(10):
        worth.loaded(100, 0.020, undisturbed=True)
    assert worth.min_blocks(ID_S, 111.0) == 8


def test_a_busy_engine_reads_its_answers_late() -> None:
    """A long time proves nothing then; a short one does."""
    worth = measured(0.002, 0.0002)
    for _ in range(10):
        worth.loaded(100, 5.0, undisturbed=False)
        worth.loaded(0, 5.0, undisturbed=False)
    assert worth.min_blocks(ID_S, 0.0) == 8
    slow = measured(0.002, 0.005)
    for _ in range(20):
        slow.loaded(100, 0.020, undisturbed=False)
    assert slow.min_blocks(ID_S, 105.0) == 8


def test_a_floor_of_0_asks_whatever_it_costs() -> None:
    assert measured(1.0, 1.0, floor=0).min_blocks(ID_S, 0.0) == 0
