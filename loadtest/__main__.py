"""`python -m loadtest --address HOST:PORT`: shared-prefix chats, with and without cache."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from banyan.client import AsyncClient
from loadtest.closed_loop import rows, run
from loadtest.workload import shared_prefix_chats
from seams.bench import Report


async def measure(options: argparse.Namespace) -> Report:
    """Run the load twice (cache on, cache off) and report one against the other."""
    chats = shared_prefix_chats(
        options.users, options.groups, options.turns, options.system_words,
        options.question_words, options.seed,
    )  # fmt: skip
    async with AsyncClient(options.address.split(","), api_key=options.api_key) as client:
        load = {"concurrency": options.concurrency, "max_tokens": options.max_tokens}
        uncached = await run(client, chats, no_cache=True, **load)
        cached = await run(client, chats, **load)
    report = Report()
    for row in rows(cached, uncached):
        report.add(row)
    return report


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="routers, separated by commas")
    parser.add_argument("--api-key")
    for name, default in (
        ("users", 16), ("groups", 2), ("turns", 3), ("system-words", 200),
        ("question-words", 12), ("max-tokens", 32), ("concurrency", 8), ("seed", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    asyncio.run(measure(options)).show(options.json)


if __name__ == "__main__":
    main()
