"""`python -m kvstore.bench`: what block identity and tiers cost, beside hashing, memcpy, pwritev,
preadv and a bare Redis client, each measured in turns with ours.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvstore.benches import host, keys, lookup, nvme, shared
from kvstore.benches.measure import SIZES
from seams.bench import Report, Row

ROUNDS = 11


class Bench(NamedTuple):
    """Rows that are measured together. `name` is what `--only` picks them by."""

    name: str
    rows: Callable[[], list[Row]]


def benches(rounds: int, directory: Path) -> Iterator[Bench]:
    """All of them, in the order of the table. Files are made in `directory`, and removed."""
    yield Bench("keys_chain_2000", lambda: [keys.chain_row(rounds)])
    for label, size in SIZES.items():
        yield Bench(f"host_{label}", partial(host.rows, label, size, rounds))
    for label, size in SIZES.items():
        yield Bench(f"nvme_{label}", partial(nvme.rows, label, size, rounds, directory))
    for label, size in SIZES.items():
        yield Bench(f"redis_{label}", partial(shared.rows, label, size, rounds))
    yield Bench("lookup_128_host", partial(lookup.host_rows, rounds))
    yield Bench("lookup_128_nvme", partial(lookup.nvme_rows, rounds, directory))
    yield Bench("lookup_128_redis", partial(lookup.redis_rows, rounds))


def parser() -> argparse.ArgumentParser:
    """The options."""
    known = ", ".join(bench.name for bench in benches(1, Path()))
    options = argparse.ArgumentParser(prog="python -m kvstore.bench", description=__doc__)
    options.add_argument("--only", default="", help=f"parts of names, by commas; of {known}")
    options.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="where the disk tier is measured, on what disk"
    )
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--json", type=Path)
    return options


def main() -> None:
    """Print the table; `--json FILE` writes it too."""
    known = parser()
    options = known.parse_args()
    report, parts = Report(), options.only.split(",")
    picked = [
        bench
        for bench in benches(options.rounds, options.dir)
        if any(part in bench.name for part in parts)
    ]
    if not picked:
        known.error(f"--only {options.only} names nothing")
    for bench in picked:
        print(f"{bench.name} ...", file=sys.stderr)
        for row in bench.rows():
            report.add(row)
    report.show(options.json)


if __name__ == "__main__":
    main()
