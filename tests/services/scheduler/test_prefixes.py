"""What a scheduler knows of each worker's L1: never more than it was told, never without bound."""

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.prefixes import ASK_S, OVER_S, Prefixes
from shared.kv import HASH_SIZE, SHORT_SIZE
from shared.messages import BlocksChanged

BLOCKS = range(1, 9)


def block(number: int) -> bytes:
    return bytes([number]) * HASH_SIZE


def shorts(*numbers: int) -> bytes:
    return b"".join(block(number)[:SHORT_SIZE] for number in numbers)


def hashes(*numbers: int) -> bytes:
    return b"".join(block(number) for number in numbers)


def changed(
    seq: int, *added: int, removed: tuple[int, ...] = (), whole: bool = False
) -> BlocksChanged:
    return BlocksChanged(
        worker="w", seq=seq, added=shorts(*added), removed=shorts(*removed), whole=whole
    )


class Known:
    """What one scheduler knows of a worker of 8 blocks."""

    def __init__(self, room: int = 100) -> None:
        self.prefixes = Prefixes()
        self.room = room
        self.now = 0.0

    def take(self, message: BlocksChanged) -> bool:
        return self.prefixes.take(message, len(BLOCKS), self.room, self.now)

    @property
    def blocks(self) -> set[int]:
        return {n for n in BLOCKS if self.prefixes.num_leading(hashes(n))}


def test_the_longest_prefix_ends_at_the_first_block_that_is_missing() -> None:
    """A block behind a hole is of no use; nor is half a hash."""
    known = Known()
    known.take(changed(0, 1, 2, 4, whole=True))
    prefixes = known.prefixes
    assert prefixes.num_leading(hashes(1, 2, 3, 4)) == 2
    assert prefixes.num_leading(hashes(1, 2)) == 2
    assert prefixes.num_leading(hashes(3, 1)) == 0
    assert prefixes.num_leading(b"") == 0
    assert prefixes.num_leading(hashes(1, 2)[:-1]) == 1


def test_what_follows_is_taken_and_what_is_older_is_dropped() -> None:
    """A bus may say a thing twice, or late."""
    known = Known()
    known.take(changed(3, 1, 2, whole=True))
    known.take(changed(4, 3, removed=(1,)))
    known.take(changed(4, 3, removed=(1,)))
    known.take(changed(3, 1))
    known.take(changed(2, 5, whole=True))
    assert known.blocks == {2, 3}
    assert not known.prefixes.asks(0.0)


def test_parts_of_an_answer_add_up() -> None:
    """What is too large for one message comes in several of the same number."""
    known = Known()
    known.take(changed(7, 6))
    known.take(changed(7, 1, 2, whole=True))
    known.take(changed(7, 3))
    assert known.blocks == {1, 2, 3}


def test_a_gap_is_asked_for_once_a_second_until_it_is_answered() -> None:
    """Meanwhile what came is believed: a guess that is partly right beats none."""
    known = Known()
    asks = known.prefixes.asks
    assert asks(0.0)
    known.take(changed(1, 1, whole=True))
    assert not asks(10.0)
    known.take(changed(3, 3))
    assert known.blocks == {1, 3}
    assert [asks(10.0), asks(10.0 + ASK_S / 2), asks(10.0 + ASK_S)] == [True, False, True]
    known.take(changed(4, 4))
    assert asks(20.0)
    known.take(changed(4, 2, whole=True))
    assert known.blocks == {2}
    assert not asks(30.0)


def test_more_blocks_than_the_worker_has_are_asked_for_anew() -> None:
    """Word of some that went must have been lost."""
    known = Known()
    known.take(changed(1, *BLOCKS, whole=True))
    assert known.take(changed(5, 100))
    assert known.blocks == set()
    assert known.prefixes.asks(0.0)


def test_a_worker_beyond_the_room_for_all_is_not_known() -> None:
    """And not asked again at once: its answer would be as long."""
    known = Known(room=2)
    assert not known.take(changed(1, 1, 2, 3, whole=True))
    known.now = OVER_S / 2
    assert known.take(changed(2, 4))
    assert known.blocks == set()
    assert not known.prefixes.asks(known.now)
    known.now = OVER_S
    assert known.prefixes.asks(known.now)
    assert known.take(changed(3, 1, 2, whole=True))
    assert known.blocks == {1, 2}


@given(st.data())
def test_however_messages_are_lost_repeated_or_late_an_answer_sets_it_right(
    data: st.DataObject,
) -> None:
    """After each answer what is known is what is there, and the bound holds at all times."""
    known = Known()
    holds: set[int] = set()
    late: list[BlocksChanged] = []
    seq = 0
    known.take(changed(0, whole=True))
    for toggled in data.draw(st.lists(st.sets(st.sampled_from(BLOCKS), min_size=1), max_size=12)):
        seq += 1
        gone = toggled & holds
        holds ^= toggled
        late.append(changed(seq, *sorted(toggled - gone), removed=tuple(sorted(gone))))
        fate = data.draw(st.sampled_from(["heard", "heard", "lost", "twice", "late"]))
        if fate in ("heard", "twice"):
            for _ in range(2 if fate == "twice" else 1):
                known.take(late[-1])
        elif fate == "late":
            known.take(data.draw(st.sampled_from(late)))
        known.now += ASK_S
        if known.prefixes.asks(known.now) and data.draw(st.booleans()):
            known.take(changed(seq, *sorted(holds), whole=True))
            assert known.blocks == holds
        assert len(known.prefixes) <= len(BLOCKS)
    known.take(changed(seq, *sorted(holds), whole=True))
    assert known.blocks == holds
