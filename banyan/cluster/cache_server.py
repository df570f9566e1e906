"""`python -m banyan.cluster.cache_server URL_FILE BYTES`: a cluster's own Valkey, until SIGTERM.

URL_FILE (0600) gets the URL, password included, once the server answers. The server dies with this
process, however that ends, and leaves no file.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
from pathlib import Path

from banyan.home import write_private
from kvstore.tiers.embedded import EmbeddedValkey
from seams.errors import BanyanError, LaunchError

POLL_S = 1.0


def serve(url_file: Path, memory_bytes: int, stopping: threading.Event) -> None:
    """Run the server until `stopping`. Raises LaunchError if it does not start, or ends first."""
    with EmbeddedValkey(memory_bytes) as server:
        write_private(url_file, server.url + "\n")
        while not stopping.wait(POLL_S):
            if not (server.watched and _listens(server.socket_path)):
                raise LaunchError("The embedded cache server has ended.")


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(POLL_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # busy: somebody is there
            return True
    return True


def main() -> int:
    """0 after a signal, 1 with one sentence if the server could not start or go on."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    try:
        serve(Path(sys.argv[1]), int(sys.argv[2]), stopping)
    except BanyanError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
