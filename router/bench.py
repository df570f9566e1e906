"""`python -m router.bench`: what indexing and placing cost in CPU time, beside a dict of sets.

The peer is what one would write first: a dict from 16-byte key to the set of replicas' names, and a
walk along the chain that intersects the sets. Both do the same work in alternation.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

from banyan.v1 import internal_pb2
from kvstore.keys import KEY_BYTES, BlockKey, ChainSpec, RootId, chain, root
from router.core import RouterCore
from router.index import DEVICE, PrefixIndex, prefixes
from router.placement import PlaceRequest
from seams.bench import Report, Row, alternate, median
from seams.clock import VirtualClock
from seams.rng import SeededRng

BLOCK_TOKENS = 16
DEPTH = 128
BATCH_BLOCKS = 64  # of one stored operation
PEER = "dict of sets"
_ROOT = root("bench", "", BLOCK_TOKENS)


class DictOfSets:
    """The peer."""

    def __init__(self) -> None:
        self.holders: dict[bytes, set[str]] = {}

    def store(self, replica: str, packed: bytes) -> None:
        """Enter the keys of one operation."""
        for at in range(0, len(packed), KEY_BYTES):
            self.holders.setdefault(packed[at : at + KEY_BYTES], set()).add(replica)

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Per replica the blocks it holds from the chain's start."""
        depths: dict[str, int] = {}
        alive: set[str] | None = None
        for depth, key in enumerate(keys, 1):
            holders = self.holders.get(key)
            alive = set(holders or ()) if alive is None else alive & (holders or set())
            if not alive:
                break
            for replica in alive:
                depths[replica] = depth
        return depths


def _cpu_s(work: Callable[[], object]) -> float:
    gc.disable()
    try:
        start = time.process_time()
        work()
        return time.process_time() - start
    finally:
        gc.enable()


def _operations(blocks: int) -> list[bytes]:
    packed = os.urandom(blocks * KEY_BYTES)
    step = BATCH_BLOCKS * KEY_BYTES
    return [packed[at : at + step] for at in range(0, len(packed), step)]


def _fill_index(operations: list[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    slots = [index.allocate() for _ in range(16)]
    for number, packed in enumerate(operations):
        index.store(slots[number % 16], DEVICE, prefixes(packed))
    return index


def _fill_peer(operations: list[bytes]) -> DictOfSets:
    peer = DictOfSets()
    for number, packed in enumerate(operations):
        peer.store(f"r{number % 16}", packed)
    return peer


def bench_adds(report: Report, rounds: int, blocks: int) -> None:
    """Blocks entered per second, from packed keys in operations of 64."""
    operations = _operations(blocks)
    samples = alternate(
        {
            "index": lambda: blocks / _cpu_s(lambda: _fill_index(operations)),
            "peer": lambda: blocks / _cpu_s(lambda: _fill_peer(operations)),
        },
        rounds,
    )
    ours, theirs = median(samples["index"]), median(samples["peer"])
    report.add(Row("index_adds", ours, "blocks/s CPU", rounds, PEER, theirs))


def _bytes_per_block(fill: Callable[[list[bytes]], object], operations: list[bytes]) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        filled = fill(operations)
        used = tracemalloc.get_traced_memory()[0]
        del filled
    finally:
        tracemalloc.stop()
    return used / (len(operations) * BATCH_BLOCKS)


def bench_memory(report: Report, blocks: int) -> None:
    """Bytes per unique block, held by one replica of sixteen each."""
    operations = _operations(blocks)
    ours = _bytes_per_block(_fill_index, operations)
    theirs = _bytes_per_block(_fill_peer, operations)
    report.add(Row("index_memory", ours, "bytes/block", 1, PEER, theirs))


def _chain(seed: int, blocks: int) -> list[BlockKey]:
    tokens = [seed * 10_000 + at for at in range(blocks * BLOCK_TOKENS)]
    return chain(ChainSpec(_ROOT, BLOCK_TOKENS), tokens)


def bench_lookup(report: Report, rounds: int, replicas: int = 16, calls: int = 500) -> None:
    """One 128-deep chain, held by 16 replicas: all to the end, or each to another depth."""
    keys = _chain(1, DEPTH)
    for name, depths in (
        ("all_hold_all", [DEPTH] * replicas),
        ("all_depths_differ", [DEPTH * (n + 1) // replicas for n in range(replicas)]),
    ):
        index, peer = PrefixIndex(), DictOfSets()
        for number, depth in enumerate(depths):
            slot, packed = index.allocate(), b"".join(keys[:depth])
            index.set_live(slot, True)
            index.store(slot, DEVICE, prefixes(packed))
            peer.store(f"r{number}", packed)
        assert len(index.match(keys)) == len(peer.match(keys)) == replicas
        samples = alternate(
            {
                "index": _per_call_us(lambda index=index: index.match(keys), calls),  # type: ignore[misc]
                "peer": _per_call_us(lambda peer=peer: peer.match(keys), calls),  # type: ignore[misc]
            },
            rounds,
        )
        ours, theirs = median(samples["index"]), median(samples["peer"])
        report.add(Row(f"lookup_{DEPTH}_{name}", ours, "us CPU", rounds, PEER, theirs))


def _per_call_us(call: Callable[[], object], calls: int) -> Callable[[], float]:
    def measure() -> float:
        def work() -> None:
            for _ in range(calls):
                call()

        return _cpu_s(work) / calls * 1e6

    return measure


def _hello(replica: str) -> internal_pb2.Hello:
    tokens = list(range(2 * BLOCK_TOKENS))
    keys = chain(ChainSpec(_ROOT, BLOCK_TOKENS), tokens)
    return internal_pb2.Hello(
        protocol=1,
        replica=replica,
        epoch=1,
        address="127.0.0.1:1",
        models=[
            internal_pb2.ServedModel(
                root_id=_ROOT, name="bench", context_tokens=8192, model_fingerprint="bench"
            )
        ],
        block_tokens=BLOCK_TOKENS,
        kv_groups=[internal_pb2.KVGroupInfo(id=0, kind="full", layers=1, block_bytes=1 << 16)],
        probe=internal_pb2.ProbeChain(root_id=_ROOT, token_ids=tokens, keys=b"".join(keys)),
    )


def _fleet(replicas: int, keys: list[BlockKey]) -> RouterCore:
    """A core with `replicas` of which every second one holds half of the chain or all of it."""
    core = RouterCore(VirtualClock(), SeededRng(1), lease_s=10.0, decisions_kept=4096)
    for number in range(replicas):
        name = f"r{number}"
        core.attach(_hello(name))
        held = keys[: DEPTH // 2 * (number % 3)]
        stored = internal_pb2.BlockOp(kind=internal_pb2.BlockOp.KIND_STORED, keys=b"".join(held))
        core.events(
            internal_pb2.EventBatch(
                replica=name, epoch=1, seq=1, ops=[stored], snapshot=True, snapshot_last=True
            )
        )
    return core


def _request(number: int, keys: list[BlockKey]) -> PlaceRequest:
    return PlaceRequest(
        request_id=f"q{number}",
        model="bench",
        root_id=RootId(_ROOT),
        tokens=len(keys) * BLOCK_TOKENS + 5,
        keys=keys,
        max_tokens=64,
    )


def _place_us(core: RouterCore, keys: list[BlockKey], calls: int) -> float:
    """Of placing alone: the requests end outside the measured time."""
    requests = [_request(number, keys) for number in range(calls)]
    took_s = 0.0
    for request in requests:
        took_s += _cpu_s(lambda request=request: core.place(request))  # type: ignore[misc]
        core.failed(request.request_id)
    return took_s / calls * 1e6


def bench_place(report: Report, rounds: int, calls: int = 200) -> None:
    """place() of a 2,053-token request: matched, priced, explained, booked; and nothing cached."""
    keys = _chain(1, DEPTH)
    unknown = _chain(2, DEPTH)
    for replicas in (2, 16, 64):
        core, peer = _fleet(replicas, keys), DictOfSets()
        for number in range(replicas):
            peer.store(f"r{number}", b"".join(keys[: DEPTH // 2 * (number % 3)]))
        samples = alternate(
            {
                "hit": lambda core=core: _place_us(core, keys, calls),  # type: ignore[misc]
                "miss": lambda core=core: _place_us(core, unknown, calls),  # type: ignore[misc]
                "peer": _per_call_us(lambda peer=peer: peer.match(keys), calls),  # type: ignore[misc]
            },
            rounds,
        )
        walk = median(samples["peer"])
        for case in ("hit", "miss"):
            ours = median(samples[case])
            name, against = f"place_{case}_{replicas}_replicas", f"{PEER}, matching only"
            report.add(Row(name, ours, "us CPU", rounds, against, walk))


def main() -> None:
    """Run all, print the table, write the JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m router.bench", description=__doc__)
    parser.add_argument("--json", type=Path, default=None, help="write the rows to this file")
    parser.add_argument("--rounds", type=int, default=7, help="samples per figure")
    parser.add_argument("--blocks", type=int, default=200_000, help="blocks in the filled index")
    args = parser.parse_args()
    report = Report("python -m router.bench")
    bench_adds(report, args.rounds, args.blocks // BATCH_BLOCKS * BATCH_BLOCKS)
    bench_memory(report, args.blocks // BATCH_BLOCKS * BATCH_BLOCKS)
    bench_lookup(report, args.rounds)
    bench_place(report, args.rounds)
    report.show(args.json)


if __name__ == "__main__":
    main()
