"""Schemathesis before a gateway and a scripted replica: it reads /openapi.json and makes bodies
that are right and bodies that are wrong by it. What it must find: no 5xx, no answer beside the
description, 4xx for whatever the description refuses, and nothing left behind.

`python tests/clients/malformed.py --python VENV/bin/python --folder RUN --bodies 10000 --seed 1`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "router_service"))
from loopback_cluster import Cluster, cluster
from scripted_replica import Script

REQUIREMENTS = ("schemathesis==4.32.5",)
POSTED = 4  # paths that take a body; the bodies are divided among them
CHECKS = (
    "not_a_server_error", "negative_data_rejection", "status_code_conformance",
    "content_type_conformance", "response_schema_conformance", "unsupported_method",
)  # fmt: skip
# A wrong body may be refused before it is read: its size alone is enough.
SETTINGS = '[checks.negative_data_rejection]\nexpected-statuses = ["4xx"]\n'
BOUND_S = 61  # a router that is this old answers an unknown model at once
QUIET_S = 10.0


@dataclass(frozen=True)
class Malformed:
    """What a run came to. `failures` are schemathesis's own sentences."""

    bodies: int
    requests: int
    statuses: dict[int, int]
    failures: tuple[str, ...]

    @property
    def server_errors(self) -> int:
        """Answers with 5xx."""
        return sum(count for status, count in self.statuses.items() if status >= 500)


def read(folder: Path) -> Malformed:
    """From the reports in `folder`: report.json and events.ndjson."""
    report = json.loads((folder / "report.json").read_text())
    failures = [_sentence(found) for found in report["failures"] + report["errors"]]
    if not report["complete"]:
        failures.append(f"The run stopped early: {report['stop_reason']}.")
    statuses: Counter[int] = Counter()
    bodies = 0
    for exchange in _exchanges(folder / "events.ndjson"):
        answer = exchange["response"]
        statuses[answer["status_code"] if answer else 0] += 1
        bodies += exchange["request"].get("body") is not None
    return Malformed(bodies, statuses.total(), dict(sorted(statuses.items())), tuple(failures))


def _exchanges(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        for line in lines:
            ended = json.loads(line).get("ScenarioFinished")
            if ended is not None:
                yield from ended["recorder"]["interactions"].values()


def _sentence(found: dict[str, Any]) -> str:
    return json.dumps(found)[:600]


def command(python: Path, folder: Path, url: str, bodies: int, seed: int) -> list[str]:
    """Schemathesis's command line; its reports go into `folder`."""
    settings = folder / "schemathesis.toml"
    settings.write_text(SETTINGS)
    return [
        str(python.parent / "st"), "--config-file", str(settings), "--no-color", "run",
        f"{url}/openapi.json", "--phases", "fuzzing,coverage", "--mode", "all",
        "--max-examples", str(-(-bodies // POSTED)), "--seed", str(seed), "--checks",
        ",".join(CHECKS), "--generation-database", "none", "--suppress-health-check", "all",
        "--continue-on-failure", "--report", "json,ndjson",
        "--report-json-path", str(folder / "report.json"),
        "--report-ndjson-path", str(folder / "events.ndjson"),
    ]  # fmt: skip


async def run(python: Path, folder: Path, bodies: int, seed: int) -> Malformed:
    """Against a gateway in this process. Raises AssertionError if anything is left behind."""
    script = Script(end_after=3, tokens_per_frame=4)
    async with cluster(script, http="127.0.0.1:0", lease_ms=60_000) as running:
        running.server._api._started_s -= BOUND_S
        line = command(python, folder, f"http://{running.server.http}", bodies, seed)
        with (folder / "said.txt").open("wb") as said:
            process = await asyncio.create_subprocess_exec(*line, stdout=said, stderr=said)
            await process.wait()
        await _nothing_left(running)
    return read(folder)


async def _nothing_left(running: Cluster) -> None:
    await running.quiet()
    gateway, [replica] = running.server._gateway, running.replicas
    await running.until(lambda: not gateway._connections, QUIET_S)
    assert running.server._api._calls == 0, "calls are still counted"
    assert gateway._bodies._bytes == 0, "bytes of bodies are still counted"
    assert all(run.task and run.task.done() for run in replica.runs.values()), "a replica works on"


def main() -> int:
    """The command."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--python", type=Path, required=True)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--bodies", type=int, default=10_000)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    found = asyncio.run(run(given.python.absolute(), given.folder, given.bodies, given.seed))
    print(f"{found.requests} requests, {found.bodies} bodies, seed {given.seed}: {found.statuses}")
    print("\n".join(found.failures))
    return 1 if found.failures or found.server_errors else 0


if __name__ == "__main__":
    sys.exit(main())
