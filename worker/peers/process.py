"""A measured process seen from the bench: started, asked, timed out, ended; knows no engine."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seams.errors import LaunchError
from worker.peers.protocol import Case, Settings

ROOT = Path(__file__).resolve().parents[2]
# Last on the path: the other interpreter's own packages come first.
BOOT = (
    "import sys, importlib; sys.path.append(sys.argv[1]);"
    " importlib.import_module(sys.argv[2]).main()"
)
START_TIMEOUT_S = 300.0  # a peer that compiles its model does so once per machine
CASE_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Command:
    """How to start an engine: `module` has a `main` that serves worker.peers.protocol."""

    name: str
    python: str
    module: str
    settings: Settings


class EngineProcess:
    """One engine's process, ready to be asked. Every failure ends it and raises LaunchError."""

    def __init__(self, command: Command, timeout_s: float = START_TIMEOUT_S) -> None:
        """Starts it and waits until it is ready: `start_s` from its first instruction on."""
        self.name = command.name
        self._folder = tempfile.TemporaryDirectory(prefix="banyan-bench-")
        self._last_words = ""
        self._errors = Path(self._folder.name) / "stderr"
        begin = time.perf_counter()
        self._process = self._spawn(command)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.facts: dict[str, Any] = self._reply("ready", timeout_s)
        self.start_s = time.perf_counter() - begin

    def ask(self, case: Case, timeout_s: float = CASE_TIMEOUT_S) -> list[float]:
        """Seconds, as the case says."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(case) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("ended by itself") from None
        seconds: list[float] = self._reply("seconds", timeout_s)
        return seconds

    def close(self) -> None:
        """End it, with all that it started; twice is no harm."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has ended, and did not read all
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # it does not listen: it is killed
            self._process.wait(CLOSE_TIMEOUT_S)
        self._end()

    def _spawn(self, command: Command) -> subprocess.Popen[str]:
        threads = str(command.settings["threads"])
        with self._errors.open("wb") as errors:
            try:
                return subprocess.Popen(
                    [command.python, "-c", BOOT, str(ROOT), command.module,
                     json.dumps(command.settings)],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                    cwd=self._folder.name, start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
                )  # fmt: skip
            except OSError as error:
                self._folder.cleanup()
                raise LaunchError(f"{self.name}: {command.python}: {error.strerror}.") from None

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _reply(self, key: str, timeout_s: float) -> Any:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failed(f"did not answer within {timeout_s:g} s") from None
        if line is None:
            raise self._failed("ended by itself")
        reply = json.loads(line)
        if key not in reply:
            raise self._failed(reply.get("error", "It answers in another protocol."), speaks=True)
        return reply[key]

    def _failed(self, reason: str, speaks: bool = False) -> LaunchError:
        """Ends it. What does not speak for itself is asked for its last words."""
        self._end()
        said = "" if speaks else self._last_words
        return LaunchError(f"{self.name}: {reason}{said and f'; it said: {said}'}")

    def _end(self) -> None:
        """Kills the session that it leads: while it is not reaped, the id is surely its."""
        process = self._process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._listener.join(CLOSE_TIMEOUT_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        if self._errors.exists():
            lines = self._errors.read_text(errors="replace").split("\n")
            self._last_words = next((x.strip() for x in reversed(lines) if x.strip()), "")
        self._folder.cleanup()
