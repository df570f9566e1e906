"""How long planned steps take, and how many of them are alike: pure sums over a plan's rows.

A plan stays what it is until a sequence ends, needs a block, or has its prompt computed: until then
each step computes the same number of cells of the same prompts beside the same sequences that
decode. So a run of them is one sum. It mutates a sequence's blocks only, by asking for those that
the later steps will write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulate.flight import Flight
from simulate.steptime import Run, StepTime
from simulate.workload import Grain
from worker.engine.paging import PagedMemory, blocks_for
from worker.engine.request import Sequence as Tokens

Row = tuple[Tokens, int]


@dataclass(slots=True)
class Rows:
    """A plan's rows, sorted."""

    decoding: list[Flight]
    chunks: list[tuple[Flight, int]]  # cells of one step

    @classmethod
    def of(cls, rows: Sequence[Row], flights: Mapping[str, Flight]) -> Rows:
        """Whoever has one cell under way and its prompt behind it decodes."""
        sorted_rows = cls([], [])
        for sequence, count in rows:
            flight = flights[sequence.request.spec.request_id]
            if sequence.inserted and count == 1:
                sorted_rows.decoding.append(flight)
            else:
                sorted_rows.chunks.append((flight, count))
        return sorted_rows


def alike(rows: Rows, memory: PagedMemory, grain: Grain) -> int:
    """How many steps like this one follow each other, at least one; their blocks are allocated."""
    steps = 1 << 30
    for flight, count in rows.chunks:
        steps = min(steps, flight.sequence.pending // count)
        if steps <= 1:
            return 1
    cell = grain.cell_tokens
    for flight in rows.decoding:
        steps = min(steps, flight.quiet_steps(cell))
    return _with_blocks(rows, memory, steps) if rows.chunks and steps > 1 else max(1, steps)


def _with_blocks(rows: Rows, memory: PagedMemory, steps: int) -> int:
    """So many steps, if there are blocks for all of them without taking any from who runs."""
    needed = 0
    for flight, count in rows.chunks:
        sequence = flight.sequence
        ends = blocks_for(sequence.computed + count * steps, memory.block_tokens)
        needed += ends - len(sequence.tables[0])
    if needed + len(rows.chunks) + len(rows.decoding) > memory.available(0):
        return 1
    for flight, count in rows.chunks:
        granted = memory.grow(flight.sequence, count * steps)
        assert granted == count * steps, "blocks that were there are not"
    return steps


def timed(rows: Rows, steps: int, times: StepTime, cell_tokens: int) -> tuple[Run, int]:
    """The run of so many steps, and how many prompt tokens it computes."""
    context = sum([flight.context_tokens for flight in rows.decoding])
    decoding = len(rows.decoding)
    growth_s = decoding * times.context_s
    total_s = steps * times.decode_s(decoding, context) + growth_s * steps * (steps - 1) / 2
    computed = 0
    for flight, count in rows.chunks:
        before, tokens = flight.chunk(count * steps, cell_tokens)
        total_s += times.prompt_extra_s(tokens, before)
        growth_s += (count * cell_tokens) ** 2 * times.pair_s
        computed += tokens
    first_s = (total_s - growth_s * steps * (steps - 1) / 2) / steps
    return Run(first_s, growth_s, steps), computed
