"""What chaining block keys costs, beside hashing the same bytes bare."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

from kvstore.keys import ChainSpec, chain, root, tokens_u32le
from seams.bench import Row, alternate, median

TOKENS = 2000
BLOCK = 16
REPEATS = 50


def _cpu_us(work: Callable[[], object]) -> float:
    """CPU microseconds of one call, over REPEATS calls: steadier than wall time."""
    start = time.process_time_ns()
    for _ in range(REPEATS):
        work()
    return (time.process_time_ns() - start) / 1000 / REPEATS


def chain_row(rounds: int) -> Row:
    """Chaining a 2,000-token prompt, against SHA-256 over each block's bytes alone."""
    tokens = [(i * 7919) % 49152 for i in range(TOKENS)]
    spec = ChainSpec(root("model", "", BLOCK), BLOCK, salt=b"s" * 32)
    packed = tokens_u32le(tokens)
    width = 4 * BLOCK

    def bare() -> None:
        for start in range(0, len(packed), width):
            hashlib.sha256(packed[start : start + width]).digest()

    samples = alternate(
        {"ours": lambda: _cpu_us(lambda: chain(spec, tokens)), "bare": lambda: _cpu_us(bare)},
        rounds,
    )
    return Row(
        "keys_chain_2000", median(samples["ours"]), "us", rounds, "bare sha256",
        median(samples["bare"]),
    )  # fmt: skip
