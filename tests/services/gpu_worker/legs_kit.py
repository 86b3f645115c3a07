"""Legs driven through a runner without a batcher."""

from services.gpu_worker.runner import Scheduled
from services.gpu_worker.sequence import Sequence
from shared.kv import BLOCK_SIZE
from shared.sampling import SamplingParams


class Legs:
    """Drives a runner as the batcher would: one step over all legs, a budget per leg."""

    def __init__(self, runner):
        self.runner = runner
        self.free = list(range(runner.spec.num_blocks))[::-1]  # block 0 is used last
        self.results = {}

    def add(self, prompt_ids, output_ids=(), **params):
        params = {"temperature": 0.0, "logprobs": 5} | params
        leg = Sequence(
            list(prompt_ids),
            SamplingParams(max_tokens=1000, **params),
            output_ids=list(output_ids),
        )
        self.results[leg] = []
        return leg

    def step(self, budgets):
        batch = []
        for leg, budget in budgets.items():
            count = min(budget, leg.num_tokens - leg.num_computed_tokens)
            need = -(-(leg.num_computed_tokens + count) // BLOCK_SIZE)
            while len(leg.block_table) < need:
                leg.block_table.append(self.free.pop())
            batch.append(Scheduled(leg, count))
        results = self.runner.execute(batch)
        for (leg, count), sampled in zip(batch, results, strict=True):
            reaches_the_end = leg.num_computed_tokens + count == leg.num_tokens
            assert (sampled.token_id is not None or sampled.fault != "") == reaches_the_end
            leg.num_computed_tokens += count
            if reaches_the_end:
                self.results[leg].append(sampled)
                leg.output_ids.append(sampled.token_id)

    def run(self, budgets, count):
        """Steps until every leg has `count` results."""
        while any(len(self.results[leg]) < count for leg in budgets):
            self.step({leg: n for leg, n in budgets.items() if len(self.results[leg]) < count})
        return [self.results[leg] for leg in budgets]


def block(runner, index):
    """The bytes of a block."""
    data = bytearray(runner.spec.block_bytes)
    runner.read_block(index, memoryview(data))
    return bytes(data)


def carried(leg, source, target):
    """The leg on another runner: its full blocks written there, the rest to be computed."""
    twin = target.add(leg.prompt_ids, leg.output_ids)
    for index in leg.block_table[: leg.num_computed_tokens // BLOCK_SIZE]:
        twin.block_table.append(target.free.pop())
        data = memoryview(bytearray(block(source.runner, index)))
        target.runner.write_block(twin.block_table[-1], data)
    twin.num_computed_tokens = len(twin.block_table) * BLOCK_SIZE
    return twin


def assert_as_good(legs, ids):
    """A leg goes on from copies of its blocks as it does from them."""
    leg = legs.add(ids)
    legs.run({leg: 64}, 2)
    twin = carried(leg, legs, legs)
    assert twin.num_computed_tokens >= len(ids) - BLOCK_SIZE
    assert set(twin.block_table).isdisjoint(leg.block_table)
    own, more = legs.run({leg: 1, twin: 64}, 4)
    assert more[:2] == own[2:4]
