"""`python -m loadtest --address HOST:PORT`: shared-prefix chats, with and without cache."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from banyan.client import AsyncClient
from loadtest.closed_loop import alternate, rows
from loadtest.workload import shared_prefix_chats
from seams.bench import Report


async def measure(options: argparse.Namespace) -> Report:
    """Run the load with and without the cache, in turns, and report one against the other."""
    chats = shared_prefix_chats(
        options.users, options.groups, options.turns, options.system_words,
        options.question_words, options.seed,
    )  # fmt: skip
    async with AsyncClient(options.address.split(","), api_key=options.api_key) as client:
        cached, uncached = await alternate(
            client, chats, concurrency=options.concurrency, max_tokens=options.max_tokens
        )
    report = Report()
    for row in rows(cached, uncached):
        report.add(row)
    return report


def _positive(text: str) -> int:
    """An argparse type."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The options. The API key comes from BANYAN_API_KEY unless given."""
    options = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    options.add_argument("--address", required=True, help="routers, separated by commas")
    options.add_argument("--api-key", default=os.environ.get("BANYAN_API_KEY") or None)
    for name, default in (
        ("users", 16), ("groups", 2), ("turns", 3), ("system-words", 200),
        ("question-words", 12), ("max-tokens", 32), ("concurrency", 8),
    ):  # fmt: skip
        options.add_argument(f"--{name}", type=_positive, default=default)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", type=Path)
    return options


def main() -> None:
    """Parse, measure, print."""
    options = parser().parse_args()
    asyncio.run(measure(options)).show(options.json)


if __name__ == "__main__":
    main()
