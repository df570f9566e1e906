"""ReplicaActor: one replica as a plain class that a launcher wraps as a Ray actor. No Ray here.

Imports nothing heavy: the thread count must stand in the environment before torch is loaded.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from seams.errors import BanyanError, LaunchError
from worker.service.settings import parse_config, set_thread_variables


def _exit_process() -> None:
    """A replica whose server died serves nobody; its launcher starts it anew, with a new epoch."""
    os._exit(1)


class ReplicaActor:
    """Builds and starts a replica; every method may be called from any thread."""

    def __init__(self, config: dict[str, Any]) -> None:
        """`config` holds ReplicaConfig's fields. Raises LaunchError with one clear sentence."""
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before grpc is loaded: see below
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
        try:
            parsed = parse_config(config)
            set_thread_variables(parsed.threads)
            from worker.service.assemble import build_replica

            self._replica = build_replica(parsed, _exit_process)
            self._replica.start()
        except BanyanError as error:
            raise LaunchError(error.message) from None

    def address(self) -> str:
        """host:port of the replica's gRPC server."""
        return self._replica.address

    def describe(self) -> dict[str, Any]:
        """Plain values: replica, pid, epoch, address, what it serves, and how its routers
        take it: `attached` (how many do), `refusal` (why one does not, "" if none refuses)."""
        return self._replica.describe()

    def drain(self, grace_s: float = 60.0) -> bool:
        """Finish what runs, take nothing new; True if all ended within `grace_s` seconds."""
        return self._replica.drain(grace_s)

    def stop(self) -> None:
        """Cancel what still runs and close the server. Safe to repeat."""
        self._replica.stop()
