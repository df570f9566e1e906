"""Runs: blocks of one call whose slots lie side by side, so that one disk operation does them all.

It knows places and their order; no records, no disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.tiers.segments import Segment

RUN_BLOCKS_MAX = 8
RUN_BYTES_MAX = 16 << 20
"""Of one disk operation, unless a single block is longer: a deadline is looked at in between."""


class Placed(NamedTuple):
    """A block of a call and its slot."""

    at: int  # which block of the call
    segment: Segment
    slot: int
    joins: bool  # whether it may share an operation with its neighbours


def runs(placed: Iterable[Placed]) -> list[list[Placed]]:
    """Every block once. Within a run slots ascend by one in one segment, whatever the order in the
    call; the runs are in the order of their first blocks in the call."""
    made: list[list[Placed]] = []
    for block in sorted(placed, key=lambda block: (block.segment.number, block.slot)):
        if made and _continues(made[-1], block):
            made[-1].append(block)
        else:
            made.append([block])
    return sorted(made, key=lambda run: min(block.at for block in run))


def _continues(run: Sequence[Placed], block: Placed) -> bool:
    last = run[-1]
    return (
        block.joins
        and last.joins
        and block.segment is last.segment
        and block.slot == last.slot + 1
        and len(run) < RUN_BLOCKS_MAX
        and (len(run) + 1) * block.segment.slot_bytes <= RUN_BYTES_MAX
    )
