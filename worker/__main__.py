"""`python -m worker --config FILE.json`: one replica without Ray. SIGTERM drains, then stops."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors reach us as such; its own prose does not

from seams.errors import BanyanError, LaunchError
from worker.service.settings import parse_config, set_thread_variables

GRACE_S = 60.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="ReplicaConfig as JSON")
    parser.add_argument("--ready-file", type=Path, help="gets address, pid and epoch as JSON")
    parser.add_argument("--grace-s", type=float, default=GRACE_S, help="how long SIGTERM may drain")
    return parser.parse_args()


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError:
        raise LaunchError(f"{path} is not valid JSON.") from None
    if not isinstance(values, dict):
        raise LaunchError(f"{path} must hold one JSON object.")
    return values


def _write_ready(path: Path, described: dict[str, Any]) -> None:
    """Whole or not at all: a reader polls for it."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps({key: described[key] for key in ("address", "pid", "epoch")}))
    fresh.replace(path)


def _serve(arguments: argparse.Namespace) -> None:
    ended = threading.Event()
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        ended.set()

    for number in SIGNALS:
        signal.signal(number, lambda *_: ended.set())
    config = parse_config(_read(arguments.config))
    set_thread_variables(config.threads)
    from worker.service.assemble import build_replica  # loads torch: after the thread count

    replica = build_replica(config, fail)
    replica.start()
    if arguments.ready_file is not None:
        _write_ready(arguments.ready_file, replica.describe())
    ended.wait()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once
    if failed.is_set():
        raise LaunchError("The replica's server ended unexpectedly; the log says why.")
    replica.drain(arguments.grace_s)
    replica.stop()


def main() -> int:
    """Run until a signal; the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        _serve(_arguments())
    except BanyanError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
