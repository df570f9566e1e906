"""Blocks for tests of the disk tier, each a function of its number; run as a program, it stores
them in a directory until it is killed."""

from __future__ import annotations

import hashlib
import random
import sys
from pathlib import Path

from kvstore.tiers.base import BlockName
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.nvme_start import reserve_bytes
from kvstore.tiers.segments import segment_cost_bytes, slot_bytes_for

SIZES = {0: 24576, 1: 5000}
REPRESENTATION = "bf16-test"
SOON = 20.0


def capacity_bytes(blocks: int, sizes: dict[int, int]) -> int:
    """What holds exactly so many blocks of the largest size, one slot to a segment."""
    budget = blocks * segment_cost_bytes(1, slot_bytes_for(max(sizes.values())))
    capacity = budget
    while capacity - reserve_bytes(capacity, sizes) < budget:
        capacity = budget + reserve_bytes(capacity, sizes)
    return capacity


def block_name(number: int) -> BlockName:
    """Chains of 8: block 8k begins one. Every fifth chain is of group 1."""
    group = int(number // 8 % 5 == 4)
    key = hashlib.sha256(b"%d" % number).digest()[:16]
    parent = hashlib.sha256(b"%d" % (number - 1)).digest()[:16] if number % 8 else bytes(16)
    return BlockName(key, parent, b"%08d" % number * 2, group)


def block_bytes(number: int) -> bytes:
    name = block_name(number)
    return hashlib.shake_128(name.key).digest(SIZES[name.group])


def open_tier(directory: Path, blocks: int = 48, **options: object) -> NvmeTier:
    options = {"free_space_floor_bytes": 0, "tended": False, **options}
    capacity = capacity_bytes(blocks, SIZES)
    return NvmeTier(directory, capacity, REPRESENTATION, SIZES, **options)  # type: ignore[arg-type]


def write_forever(directory: Path, seed: int) -> None:
    """Store chains at random, now and then load one or write a snapshot; never ends."""
    rng = random.Random(seed)
    tier = open_tier(directory)
    blocks = [memoryview(block_bytes(number)) for number in range(128)]
    print("ready", flush=True)
    while True:
        first = 8 * rng.randrange(16)
        numbers = range(first, first + rng.randrange(1, 9))
        names = [block_name(number) for number in numbers]
        tier.store(names, [blocks[number] for number in numbers], SOON)
        match rng.randrange(40):
            case 0:
                tier.snapshot()
            case 1:
                tier.discard(names[-1:])
            case 2:
                tier.clear()


if __name__ == "__main__":
    write_forever(Path(sys.argv[1]), int(sys.argv[2]))
