"""The disk tiers of a cluster's replicas in one directory, for an operator. No replica is needed.

One that a running replica has cannot be looked into: it is named, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from seams.blockfolder import LOCK_NAME
from seams.errors import LaunchError

T = TypeVar("T")


@dataclass(frozen=True)
class Of(Generic[T]):
    """What one replica's directory gave, or why it gave nothing."""

    replica: str
    found: T | None
    problem: str = ""


def directories(parent: Path) -> list[Path]:
    """The tiers' directories in `parent`, or itself if it is one. Raises LaunchError if there are
    none."""
    try:
        inside = [parent, *sorted(path for path in parent.iterdir() if path.is_dir())]
        tiers = [path for path in inside if (path / LOCK_NAME).is_file()]
    except OSError as error:
        raise LaunchError(f"{parent} cannot be read: {error.strerror}.") from None
    if not tiers:
        raise LaunchError(f"There is no disk tier in {parent}.")
    return tiers


def each(paths: tuple[Path, ...], look: Callable[[Path], T]) -> list[Of[T]]:
    """`look` at every directory; a LaunchError is that one's problem alone."""
    seen: list[Of[T]] = []
    for path in paths:
        try:
            seen.append(Of(path.name, look(path)))
        except LaunchError as error:
            seen.append(Of(path.name, None, error.message))
    return seen
