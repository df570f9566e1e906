"""Where Banyan keeps what outlives a command: models and cluster states. It knows no contents."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from seams.errors import LaunchError


def home() -> Path:
    """$BANYAN_HOME, or ~/.cache/banyan. Created by nobody until something is stored."""
    given = os.environ.get("BANYAN_HOME")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "banyan"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A full disk or a folder that is not ours is the user's to mend: it needs one sentence."""
    try:
        yield
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}.") from error


def private_folder(path: Path) -> Path:
    """Create `path` (and its parents) readable by this user alone. Raises LaunchError."""
    with _writing(path):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    return path


def write_private(path: Path, text: str) -> None:
    """Replace a file's content atomically; mode 0600 from its first byte on. Raises LaunchError,
    and the file is as it was."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with _writing(path):
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write(text)
            fresh.replace(path)
        except OSError:
            with suppress(OSError):
                fresh.unlink()
            raise


@contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path` (created if missing); waits for whoever holds it, after a call of
    `waiting`. Raises LaunchError."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
