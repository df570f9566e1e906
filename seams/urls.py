"""URLs that may hold a password: read from a private file, shown without it. It opens no socket."""

from __future__ import annotations

import stat
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit

from seams.errors import LaunchError

FILE_MARK = "@"


def read_url(text: str) -> str:
    """`text`, or the one line of the file that `@FILE` names. Raises LaunchError if that cannot be
    read, or is open to others and holds a password.

    The group may read it: Kubernetes mounts a secret for the pod's group.
    """
    if not text.startswith(FILE_MARK):
        return text
    path = Path(text.removeprefix(FILE_MARK)).expanduser()
    try:
        mode = path.stat().st_mode
        url = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise LaunchError("The file that holds the shared cache's URL cannot be read.") from None
    if has_password(url) and stat.S_IMODE(mode) & (stat.S_IRWXO | stat.S_IWGRP):
        raise LaunchError(
            "The file that holds the shared cache's URL has a password in it and must not be "
            "readable by others (chmod 600)."
        )
    return url


def has_password(url: str) -> bool:
    """Whether showing `url` would show a password."""
    found = _split(url)
    return bool(found.password) or "password" in parse_qs(found.query, keep_blank_values=True)


def port_is_valid(url: str) -> bool:
    """Whether the URL names no port, or one that can be."""
    try:
        return _split(url).port != 0
    except ValueError:
        return False


def without_password(url: str) -> str:
    """Scheme, host and path: for people, and for files that others read."""
    found = _split(url)
    return f"{found.scheme}://{found.netloc.rpartition('@')[2]}{found.path}"


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        raise LaunchError("The shared cache's URL is malformed.") from None
