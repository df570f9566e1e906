"""Which pages are kept and what moves between them, so that survivors fill as few pages as they
can: numbers only, no block and no bytes.

Pages with most survivors are kept; their holes, slots of dropped tokens, are filled from the pages
that go. So what moves is as many tokens as there are holes, not as there are survivors; no slot
that is written is one that is read; and no page is needed beside those there are. Order among
survivors is not kept: attention does not depend on it, and rotated keys carry their positions.

The outcome is a function of what survives alone, never of who shares which page: the order of slots
is the order in which attention adds, and a stream is the same wherever it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.slots import Longs
from worker.engine.retention.base import Ints, Mask


@dataclass(frozen=True)
class Packing:
    """New page i is old page order[i]. A move copies, of row `rows` (of R), slot `sources` of the
    old order to slot `targets` of the new one; a slot is page * block_tokens + offset."""

    order: Ints  # [pages]
    rows: Longs  # [moves]
    sources: Longs
    targets: Longs
    staying: Mask  # [R, pages, block_tokens] survivors in new pages that do not move
    kept: int  # slots


def pack(kept: Mask, fixed: int, block_tokens: int) -> Packing:
    """Pack the survivors of kept [R, n]: as many in each row, the first `fixed` among them, which
    stay where they are."""
    counts = kept.sum(axis=1)
    count = int(counts[0])
    assert (counts == count).all() and count > 0 and kept[:, :fixed].all()
    pages = -(-kept.shape[1] // block_tokens)
    padded = np.zeros((len(kept), pages * block_tokens), dtype=np.bool_)
    padded[:, : kept.shape[1]] = kept
    by_page = padded.reshape(len(kept), pages, block_tokens)
    order = _order(by_page, fixed, count)
    inside = np.arange(len(order) * block_tokens).reshape(-1, block_tokens) < count
    staying = by_page[:, order] & inside
    going = by_page.copy()
    going[:, order] &= ~inside
    rows, sources = np.nonzero(going.reshape(len(kept), -1))
    hole_rows, targets = np.nonzero((~staying & inside).reshape(len(kept), -1))
    assert np.array_equal(rows, hole_rows), "a hole without a survivor, or the reverse"
    return Packing(order, rows, sources, targets, staying, count)


def _order(by_page: Mask, fixed: int, count: int) -> Ints:
    """The pages to keep: those of fixed slots in place, the others by index, last the one with
    fewest survivors behind what the last page has room for."""
    size = by_page.shape[2]
    occupied = by_page.sum(axis=(0, 2), dtype=np.int64)
    needed = -(-count // size)
    lead = -(-fixed // size)
    others = np.arange(lead, by_page.shape[1])
    densest = others[np.argsort(-occupied[others], kind="stable")][: needed - lead]
    chosen = np.sort(densest)
    rest = count - (needed - 1) * size  # survivors on the last page
    if rest < size and len(chosen):
        behind = by_page[:, chosen, rest:].sum(axis=(0, 2), dtype=np.int64)
        last = len(chosen) - 1 - int(behind[::-1].argmin())
        chosen = np.append(np.delete(chosen, last), chosen[last])
    return np.concatenate([np.arange(lead), chosen]).astype(np.int32)
