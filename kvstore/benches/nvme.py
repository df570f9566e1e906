"""The disk tier beside bare pwritev and preadv of the same bytes, past the page cache."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kvstore.benches.measure import (
    CALL_BLOCKS,
    REPRESENTATION,
    Pair,
    Race,
    by_two,
    chain_names,
    cut,
    load,
    memory,
    overhead_row,
    store,
)
from kvstore.record import HEADER_BYTES
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.nvme_start import reserve_bytes
from kvstore.tiers.segments import segment_cost_bytes, slot_bytes_for
from seams.bench import Row
from seams.blockdevice import FileBlockDevice
from seams.blockfolder import FileBlockFolder

TOTAL_BYTES = 64 << 20
_SIZE_GROUP = 0


def capacity_bytes(blocks: int, block_bytes: int) -> int:
    """What an NvmeTier must be allowed so that it holds about so many blocks of one size."""
    sizes = {_SIZE_GROUP: block_bytes}
    segments = segment_cost_bytes(blocks, slot_bytes_for(block_bytes))
    capacity = segments
    while capacity - reserve_bytes(capacity, sizes) < segments:
        capacity = segments + reserve_bytes(capacity, sizes)
    return capacity


class _RawFile:
    """One preallocated file of the tier's slots, opened as the tier's files are; a header page and
    a block are moved by one call, without a look at them."""

    def __init__(self, directory: Path, block_bytes: int, count: int) -> None:
        folder = FileBlockFolder(directory)
        direct = folder.memory_alignment > 1
        folder.close()
        self._slot_bytes = slot_bytes_for(block_bytes)
        path = directory / "raw"
        FileBlockDevice(path, count * self._slot_bytes).close()
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
        self._drops = not direct
        self._page = memory(HEADER_BYTES, 1)

    def write(self, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        for slot, view in zip(slots, views, strict=True):
            os.pwritev(self._fd, [self._page, view], slot * self._slot_bytes)

    def read(self, slots: Sequence[int], views: Sequence[memoryview]) -> None:
        for slot, view in zip(slots, views, strict=True):
            at = slot * self._slot_bytes
            os.preadv(self._fd, [self._page, view], at)
            if self._drops:
                os.posix_fadvise(self._fd, at, self._slot_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)


class NvmeBench:
    """A tier hardly larger than what one pass stores: from the second pass on it writes over what
    it evicts, as one does that has been running for a while; the raw file too, in random order."""

    def __init__(self, directory: Path, block_bytes: int) -> None:
        self.count = TOTAL_BYTES // block_bytes
        self.source = cut(memory(TOTAL_BYTES, 1), block_bytes)
        self.target = cut(memory(TOTAL_BYTES), block_bytes)
        capacity = capacity_bytes(self.count + CALL_BLOCKS, block_bytes)
        self.tier = NvmeTier(
            directory / "tier", capacity, REPRESENTATION, {0: block_bytes}, free_space_floor_bytes=0
        )
        self.raw = _RawFile(directory / "raw", block_bytes, self.count)
        self.names = [chain_names(at, CALL_BLOCKS) for at in range(0, self.count, CALL_BLOCKS)]
        self._rng = random.Random(1)

    def _slots(self) -> list[int]:
        return self._rng.sample(range(self.count), self.count)

    def stores(self, turn: int) -> Iterator[Pair]:
        """Calls of CALL_BLOCKS."""
        slots = self._slots()
        for call in range(len(self.names)):
            names = self.names[call] = chain_names((turn, call), CALL_BLOCKS)
            here = slice(call * CALL_BLOCKS, (call + 1) * CALL_BLOCKS)
            yield Pair(
                partial(store, self.tier, names, self.source[here]),
                partial(self.raw.write, slots[here], self.source[here]),
            )

    def loads(self, _: int) -> Iterator[Pair]:
        """Calls of CALL_BLOCKS, of what was stored last; in random order too."""
        slots = self._slots()
        for call, names in enumerate(self._rng.sample(self.names, len(self.names))):
            here = slice(call * CALL_BLOCKS, (call + 1) * CALL_BLOCKS)
            yield Pair(
                partial(load, self.tier, names, self.target[here]),
                partial(self.raw.read, slots[here], self.target[here]),
            )

    def close(self) -> None:
        """The files are the caller's to remove."""
        self.tier.close()
        self.raw.close()


def rows(label: str, block_bytes: int, rounds: int, directory: Path) -> list[Row]:
    """Storing and loading in calls of a few blocks, by one thread and by two at a time, as many as
    the engine gives a disk: then one checks or sums while the other's bytes move. In a directory of
    its own in `directory`."""
    stored = Race(f"nvme_store_{label}", "pwritev", block_bytes)
    loaded = Race(f"nvme_load_{label}", "preadv", block_bytes)
    stored_twice = Race(f"nvme_store_two_{label}", "pwritev", block_bytes, 2 * CALL_BLOCKS)
    loaded_twice = Race(f"nvme_load_two_{label}", "preadv", block_bytes, 2 * CALL_BLOCKS)
    with tempfile.TemporaryDirectory(prefix="bench-nvme-", dir=directory) as made:
        bench = NvmeBench(Path(made), block_bytes)
        try:
            stored.run(bench.stores, rounds)
            loaded.run(bench.loads, rounds)
            with ThreadPoolExecutor(2) as threads:
                stored_twice.run(partial(by_two, threads, bench.stores), rounds)
                loaded_twice.run(partial(by_two, threads, bench.loads), rounds)
        finally:
            bench.close()
    overhead = overhead_row(f"nvme_overhead_us_{label}", [stored, loaded])
    races = (stored, loaded, stored_twice, loaded_twice)
    return [*(race.row() for race in races), overhead]
