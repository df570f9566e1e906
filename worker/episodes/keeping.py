"""A model's episodes in its tiers: put there page by page, and copied back into pages. It knows
objects and pages; not what an episode is about, and no request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvstore.fetch import Place
from kvstore.keys import BlockKey
from kvstore.objectnames import ObjectName
from kvstore.objects import Blocks, Finding, Objects
from worker.engine.derived_state import DerivedState
from worker.episodes.base import EpisodeIndex, EpisodeOptions
from worker.episodes.record import decode_index, encode_index, episode_name, index_name
from worker.models.base import Model

POLL_S = 0.002


class EpisodeShelf:
    """The episodes of the conversation whose last block has the key `last`. Puts and copies; waits
    for tiers only where a call says so, so it is for tools and not for an engine's thread."""

    def __init__(
        self, objects: Objects, model: Model, last: BlockKey, options: EpisodeOptions
    ) -> None:
        self._objects, self._model = objects, model
        self._last, self._options = last, options

    def put_index(self, index: EpisodeIndex) -> bool:
        """False if there was no room for it in host memory. What is there already is written anew,
        as of an episode: it would vanish when it would have without us."""
        return self._put(index_name(self._last, self._options), encode_index(index))

    def put_episode(self, episode: int, state: DerivedState, pages: Sequence[int]) -> bool:
        """Copy these pages of the model's pool, which hold state.positions; False as above."""
        name = episode_name(self._last, self._options, episode)
        views, _ = _views(self._model, pages)
        return self._put(name, state.encode(), views)

    def _put(self, name: ObjectName, meta: bytes, blocks: Blocks = ()) -> bool:
        self._objects.discard(name, meta, blocks)
        return self._objects.put(name, meta, blocks)

    def index(self, timeout_s: float) -> EpisodeIndex | None:
        """The index, if it comes within that time and is one."""
        finding = self._objects.find([index_name(self._last, self._options)])
        try:
            meta = self._meta(finding, time.monotonic() + timeout_s)
            return None if meta is None else decode_index(meta)
        finally:
            self._objects.cancel(finding)

    def load_episode(
        self, episode: int, pages: Sequence[int], timeout_s: float
    ) -> DerivedState | None:
        """Copy an episode into these pages of the model's pool, of which it takes the first ones.
        None, and whatever is in the pages, if it does not come whole within that time or needs
        more of them."""
        finding = self._objects.find([episode_name(self._last, self._options, episode)])
        end_s = time.monotonic() + timeout_s
        try:
            meta = self._meta(finding, end_s)
            size = self._model.spec.block_tokens
            state = None if meta is None else DerivedState.decode(meta, size)
            if state is None or self._objects.block_count(finding, 0) > len(pages):
                return None
            self._objects.bring(finding, 0)
            while self._objects.blocks_place(finding, 0) > Place.ABSENT:
                if self._objects.blocks_place(finding, 0) is Place.READY:
                    taken = pages[: self._objects.block_count(finding, 0)]
                    return state if self._copy(finding, taken) else None
                if time.monotonic() > end_s:
                    break
                time.sleep(POLL_S)
            return None
        finally:
            self._objects.cancel(finding)

    def _meta(self, finding: Finding, end_s: float) -> bytes | None:
        objects = self._objects
        while objects.place(finding, 0) > Place.ABSENT and time.monotonic() < end_s:
            meta = objects.meta(finding, 0)
            if meta is not None:
                return meta
            time.sleep(POLL_S)
        return None

    def _copy(self, finding: Finding, pages: Sequence[int]) -> bool:
        views, copied = _views(self._model, pages)
        with self._objects.pinned(finding, 0):
            if not self._objects.load(finding, 0, views):
                return False
        if copied:
            for number, ranks in zip(pages, views[0], strict=True):
                for rank, view in enumerate(ranks):
                    self._model.write_block(0, number, bytes(view), rank)
        return True


def _views(model: Model, pages: Sequence[int]) -> tuple[Blocks, bool]:
    """Bytes of these pages, and whether they are copies, since the pool is not host memory."""
    (group,) = model.spec.groups
    found, copied = [], False
    for block in pages:
        ranks = []
        for rank in range(group.ranks):
            view = model.block_view(0, block, rank)
            if view is None:
                copied = True
                view = memoryview(bytearray(model.read_block(0, block, rank)))
            ranks.append(view)
        found.append(ranks)
    return [found], copied
