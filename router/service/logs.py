"""One JSON object per line on stderr. Never a prompt, an output, a key or a client's address."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any

LOG = logging.getLogger("banyan.router")


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": round(time.time(), 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up(level: str) -> None:
    """Send the router's log lines to stderr from `level` on."""
    stderr = logging.StreamHandler(sys.stderr)
    stderr.setFormatter(_JsonLines())
    LOG.handlers[:] = [stderr]
    LOG.setLevel(level.upper())
    LOG.propagate = False


def where(error: Exception) -> dict[str, Any]:
    """Fields that say where an unexpected error happened; its text is not told, it may hold a
    prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return {"kind": type(error).__name__, "where": [f"{f.name}:{f.lineno}" for f in frames]}


def note(level: int, event: str, **fields: Any) -> None:
    """Write one line, if `level` is on."""
    if LOG.isEnabledFor(level):
        LOG.log(level, event, extra={"fields": fields})
