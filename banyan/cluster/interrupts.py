"""Delays Ctrl-C and SIGTERM over steps that must not be torn: a process started but not noted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Signals that would interrupt the body arrive after it. Does nothing off the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {n: signal.signal(n, remember) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, action in before.items():
            signal.signal(number, action)
    if came:
        signal.raise_signal(came[0])
