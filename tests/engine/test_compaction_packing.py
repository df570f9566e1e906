"""Packing survivors into pages: nothing lost, nothing doubled, no slot both read and written."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.packing import Packing, pack
from worker.engine.retention.base import Mask


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mask, int, int]:
    """Survivors [R, n], how many leading ones are fixed, tokens of a block."""
    size = draw(st.sampled_from([1, 2, 4, 16]))
    stored = draw(st.integers(1, 6 * size + 3))
    rows = draw(st.sampled_from([1, 1, 3]))
    fixed = draw(st.integers(0, stored))
    free = draw(st.integers(0, stored - fixed))
    assert fixed + free <= stored
    if fixed + free == 0:
        fixed = 1
    chance = np.random.default_rng(draw(st.integers(0, 2**32)))
    kept = np.zeros((rows, stored), dtype=np.bool_)
    kept[:, :fixed] = True
    for row in kept:
        row[fixed + chance.permutation(stored - fixed)[:free]] = True
    return kept, fixed, size


def contents(packing: Packing, kept: Mask, size: int) -> np.ndarray:
    """What lies in the new pages, [R, slots], if slot i of the old ones held i."""
    pages = -(-kept.shape[1] // size)
    old = np.broadcast_to(np.arange(pages * size), (len(kept), pages * size)).copy()
    new = old.reshape(len(kept), pages, size)[:, packing.order].reshape(len(kept), -1)
    new[packing.rows, packing.targets] = old[packing.rows, packing.sources]
    return new[:, : packing.kept]


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_survivor_is_there_once_in_as_few_pages_as_can_be(
    case: tuple[Mask, int, int],
) -> None:
    kept, fixed, size = case
    packing = pack(kept, fixed, size)
    assert len(packing.order) == -(-int(kept[0].sum()) // size)
    assert len(set(packing.order.tolist())) == len(packing.order)
    found = contents(packing, kept, size)
    for row, survivors in zip(found, kept, strict=True):
        assert sorted(row.tolist()) == np.nonzero(survivors)[0].tolist()
        assert row[:fixed].tolist() == list(range(fixed)), "a fixed slot moved"


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_no_slot_is_read_and_written(case: tuple[Mask, int, int]) -> None:
    """So moves need no order, no room beside the pages there are, and may be made again."""
    kept, fixed, size = case
    packing = pack(kept, fixed, size)
    page, offset = np.divmod(packing.targets, size)
    written = set(
        zip(packing.rows.tolist(), (packing.order[page] * size + offset).tolist(), strict=True)
    )
    read = set(zip(packing.rows.tolist(), packing.sources.tolist(), strict=True))
    assert len(written) == len(read) == len(packing.rows)
    assert not written & read
    survivors = set(zip(*(axis.tolist() for axis in np.nonzero(kept)), strict=True))
    assert read <= survivors and not written & survivors


@given(cases())
@settings(max_examples=200, deadline=None, derandomize=True)
def test_what_moves_is_at_most_what_goes(case: tuple[Mask, int, int]) -> None:
    """A move fills a hole, so there are no more than dropped tokens, and unused places of the last
    page where it is the fixed slots' own; in order, as many as survivors would move."""
    kept, fixed, size = case
    packing = pack(kept, fixed, size)
    holes = (~kept).sum(axis=1) + (-kept.shape[1] % size)
    moves = np.bincount(packing.rows, minlength=len(kept))
    assert (moves <= holes).all()


def test_whole_dropped_pages_move_nothing() -> None:
    kept = np.ones((1, 64), dtype=np.bool_)
    kept[0, 16:48] = False
    packing = pack(kept, 4, 16)
    assert packing.order.tolist() == [0, 3] and not len(packing.rows)


def test_the_densest_pages_stay_and_the_rest_fills_their_holes() -> None:
    kept = np.zeros((1, 16), dtype=np.bool_)
    kept[0, [0, 1, 2, 5, 8, 9, 11, 12, 13]] = True  # 3, 1, 3 and 2 of 4
    packing = pack(kept, 0, 4)
    assert packing.order.tolist() == [0, 2, 3]
    assert packing.sources.tolist() == [5, 13] and packing.targets.tolist() == [3, 6]
