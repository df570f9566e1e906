"""`python -m router --config FILE.json`: one router process, from its configuration to its end."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors reach us as such; its own prose does not

import uvloop

from router.config import RouterConfig
from router.core import RouterCore
from router.service import logs
from router.service.server import RouterServer
from seams.clock import SystemClock
from seams.errors import InternalError, LaunchError
from seams.proof import read_secret
from seams.rng import SystemRng

GRACE_S_MAX = 3600.0
# What differs from pod to pod
OPTIONS = ("router", "secret_file", "listen", "internal", "http", "metrics")
ADDRESSES = ("listen", "internal", "http", "metrics")


def read_config(path: Path | None, given_options: Mapping[str, str | float]) -> RouterConfig:
    """The configuration in a JSON file, if any; options that are given win. Raises LaunchError."""
    try:
        given = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError):
        raise LaunchError(f"The configuration {path} cannot be read as JSON.") from None
    if not isinstance(given, dict):
        raise LaunchError(f"The configuration {path} is not a JSON object.")
    given = {**given, **given_options}
    unknown = sorted(given.keys() - {field.name for field in fields(RouterConfig)})
    if unknown:
        raise LaunchError(f"The configuration has an unknown field: {unknown[0]}.")
    try:
        config = RouterConfig(**given)
    except TypeError:
        raise LaunchError("The configuration lacks router or secret_file.") from None
    grace_s = config.grace_s
    if not isinstance(grace_s, int | float) or not 0 <= grace_s <= GRACE_S_MAX:
        raise LaunchError(f"The configuration's grace_s is not between 0 and {GRACE_S_MAX:g}.")
    return config


def addresses(server: RouterServer) -> dict[str, str]:
    """Where a started router listens, by name; "" = not at all."""
    return {name: getattr(server, name) for name in ADDRESSES}


def write_ready(path: Path, server: RouterServer) -> None:
    """Say where the router listens; the file appears whole or not at all."""
    where = addresses(server)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(where | {"pid": os.getpid()}) + "\n")
    part.replace(path)


async def serve(config: RouterConfig, secret: bytes) -> None:
    """Run until SIGTERM or SIGINT; a second one does not wait for streams. Raises LaunchError;
    InternalError if the router could not go on and has stopped by itself."""
    clock, rng = SystemClock(), SystemRng()
    core = RouterCore(
        clock, rng, lease_s=config.lease_ms / 1000, decisions_kept=config.decisions_kept
    )
    server = RouterServer(config, secret, core, clock, rng)
    loop, signals = asyncio.get_running_loop(), asyncio.Queue[int]()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    await server.start()
    if config.ready_file:
        write_ready(Path(config.ready_file), server)
    logs.note(logging.INFO, "listening", **addresses(server))
    told, broken = asyncio.create_task(signals.get()), asyncio.create_task(server.broken())
    await asyncio.wait({told, broken}, return_when=asyncio.FIRST_COMPLETED)
    failed = not told.done()
    stopping = asyncio.create_task(server.stop(config.grace_s))
    again = asyncio.create_task(signals.get()) if told.done() else told
    await asyncio.wait({stopping, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if stopping.done():
        stopping.result()
    if failed:
        raise InternalError("The router could not go on; its log says where it failed.")


def main() -> int:
    """0 after an orderly stop, 1 if it could not start; then stderr says why in one sentence."""
    parser = argparse.ArgumentParser(prog="python -m router", description=__doc__)
    parser.add_argument("--config", type=Path, help="JSON with RouterConfig fields")
    for name in OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", help="overrides the file's field")
    parser.add_argument("--grace-s", type=float, help="overrides the file's field")
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"]
    )
    arguments = parser.parse_args()
    logs.set_up(arguments.log_level)
    try:
        options = {name: value for name in OPTIONS if (value := getattr(arguments, name))}
        if arguments.grace_s is not None:
            options["grace_s"] = arguments.grace_s
        config = read_config(arguments.config, options)
        uvloop.run(serve(config, read_secret(Path(config.secret_file))))
    except (LaunchError, InternalError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
