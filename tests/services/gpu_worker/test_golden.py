"""Greedy ids of the default model in fp32 are those of `transformers` on the same weights."""

import json
from itertools import combinations, product
from typing import NamedTuple

import pytest

from services.gpu_worker.model_runner import load_runner
from services.tokenizer.tokenizer import Tokenizer
from shared.kv import BLOCK_SIZE
from shared.model_files import default_model, read_model
from shared.sampling import SamplingParams
from tests.golden.make import FILE, NEW_IDS
from tests.golden.prompts import prompts
from tests.services.gpu_worker.core_kit import Ask, Core, Row

GOLDEN = json.loads(FILE.read_text())
NUM_BLOCKS = 300
ASKED = 36  # ids a leg: more than golden ones, so that all are there when the last prompt comes


class Cell(NamedTuple):
    """How a prompt is answered: in how large a batch, in what chunks, and what happens to it."""

    batch: int
    chunk: int
    event: str


FACTORS = ((1, 3, 8, 17), (1, 16, 512), ("none", "prefix hit", "preemption", "resume"))


def is_possible(cell):
    """A leg that is alone is never preempted: it fits the pool, or it is refused."""
    return cell.batch > 1 or cell.event != "preemption"


def pairs(cell):
    return set(combinations(enumerate(cell), 2))


def pairwise(factors, is_possible):
    """Few cells that hold every possible pair of values of two factors: again and again the cell
    with most of those still missing.
    """
    cells = [*filter(is_possible, map(Cell._make, product(*factors)))]
    missing = set().union(*map(pairs, cells))
    while missing:
        yield (cell := max(cells, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(cell)


CELLS = [*pairwise(FACTORS, is_possible)]


def test_the_cells_hold_every_pair():
    """Every batch size with every chunk, either with every event; few cells beyond the fewest."""
    batches, chunks, events = FACTORS
    assert {(cell.batch, cell.chunk) for cell in CELLS} == {*product(batches, chunks)}
    assert {(cell.chunk, cell.event) for cell in CELLS} == {*product(chunks, events)}
    all_events = {*product(batches, events)}
    assert {(cell.batch, cell.event) for cell in CELLS} == all_events - {(1, "preemption")}
    assert len(CELLS) <= len(all_events) + 2


def num_known(golden):
    """How many ids of its prompt an earlier leg computes where a prefix is to be found."""
    length = num_prompt_ids(golden)
    known = max(length // 2, BLOCK_SIZE) // BLOCK_SIZE * BLOCK_SIZE
    return known if known < length else 0


def num_prompt_ids(golden):
    return len(golden["prompt_ids"])


def chosen(cell):
    """The golden answers of a cell. The last prompt is longer than a chunk, even behind a cached
    prefix; those before it are short, so that they decode when it comes.
    """
    is_hit = cell.event == "prefix hit"
    longest = {1: 21, 16: 129, 512: 2000 if is_hit else 513}[cell.chunk]
    fitting = [g for g in sorted(GOLDEN, key=num_prompt_ids) if num_prompt_ids(g) <= longest]
    last = fitting.pop()
    company = [golden for golden in fitting if num_prompt_ids(golden) <= 129]
    if is_hit:
        company.sort(key=lambda golden: num_known(golden) == 0)
    elif cell.chunk > 1:  # not always the shortest
        turn = 11 * CELLS.index(cell) % len(company)
        company = company[turn:] + company[:turn]
    return [*company[: cell.batch - 1], last]


def num_blocks(cell, goldens):
    """Where legs are to be preempted, enough to take all of them, not enough for what they say."""
    if cell.event != "preemption":
        return NUM_BLOCKS
    return sum(-(-num_prompt_ids(g) // BLOCK_SIZE) for g in goldens) + cell.batch * 3 // 2


def asks(cell, goldens):
    """Where legs resume, the last does, and every second one before it."""
    delivered = 5 if cell.event == "resume" else 0
    for place, golden in enumerate(goldens, 1 - len(goldens)):
        output_ids = [] if place % 2 else golden["ids"][:delivered]
        yield ask(golden["prompt_ids"], ASKED, output_ids)


def ask(prompt_ids, count, output_ids=()):
    return Ask(prompt_ids, SamplingParams(max_tokens=count, temperature=0), output_ids)


def check(golden, ids, start):
    """Equal up to a near tie that fell the other way, after which all may differ."""
    for index, found in enumerate(ids[: NEW_IDS - start], start):
        if found != golden["ids"][index]:
            assert found == golden["near_ties"].get(str(index)), (golden["ids"], ids)
            return


def test_the_prompts_are_encoded_as_they_were():
    tokenizer = Tokenizer(read_model(default_model()))
    found = prompts(tokenizer.encode)
    assert found == [golden["prompt_ids"] for golden in GOLDEN]
    assert len(found) >= 30
    assert {len(ids) for ids in found} >= {1, 2000}


def test_every_golden_answer_is_asked_for():
    found = [golden for cell in CELLS for golden in chosen(cell)]
    assert all(golden in found for golden in GOLDEN)


@pytest.fixture(scope="module")
def runner():
    return load_runner(
        default_model(),
        progress=[].append,
        dtype="fp32",
        quantize="none",
        num_blocks=NUM_BLOCKS,
        kv_bytes_max=0,
        max_model_len=2100,
        num_threads=1,
        step_threads=1,
    )


@pytest.mark.timeout(600)  # small cells take 10 s of one processor, which may be a busy one
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_greedy_ids_are_golden(runner, cell):
    """Through the whole core, and what the cell names is seen to have happened."""
    goldens = chosen(cell)
    core = Core(runner, batch=cell.batch, chunk=cell.chunk, num_blocks=num_blocks(cell, goldens))
    if cell.event == "prefix hit":
        core.answers([ask(g["prompt_ids"][: num_known(g)], 1) for g in goldens if num_known(g)])
    asked = [*asks(cell, goldens)]
    answers = core.answers(asked)
    for golden, (_, _, delivered), answer in zip(goldens, asked, answers, strict=True):
        assert len(delivered) + len(answer.ids) == ASKED
        check(golden, answer.ids, len(delivered))

    assert any(len(rows) == cell.batch and Row(cell.chunk, False) in rows for rows in core.steps)
    assert (core.num_preemptions > 0) == (cell.event == "preemption")
    if cell.event == "prefix hit":
        hits = zip(goldens, core.num_cached_tokens[-cell.batch :], strict=True)
        assert all(cached >= num_known(golden) for golden, cached in hits)
