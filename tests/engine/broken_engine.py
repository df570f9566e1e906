"""An engine that fails in the way its settings say, served like any other by the real protocol."""

import os
import time
from collections.abc import Sequence
from typing import Any

from worker.peers.protocol import Settings, serve


class Broken:
    """Starts at once; its first step crashes, hangs or raises."""

    def __init__(self, settings: Settings) -> None:
        self._how = settings["extra"]
        print("this is no JSON, and must not get among the replies", flush=True)
        if self._how == "start":
            raise ValueError("it does not start\nfor two reasons")

    def facts(self) -> dict[str, Any]:
        """Its version."""
        return {"version": "0"}

    def add(self, prompt: Sequence[int], output_tokens: int, together: bool = False) -> None:
        """Nothing."""

    def step(self) -> int:
        """Never returns."""
        if self._how == "hang":
            time.sleep(3600)
        if self._how == "crash":
            os.write(2, b"out of luck\n")
            os._exit(3)
        raise ValueError("it is broken")

    def busy(self) -> bool:
        """Always."""
        return True


def main() -> None:
    """Serve until it fails."""
    serve(Broken)
