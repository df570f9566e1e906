"""The contract of a third-party client: how it is installed, called and read. Knows no client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TORCH = ("torch==2.13.0",)  # by itself and first, so that pip takes the build for CPUs
HUB_NAME = "banyan/demo"  # of the tokenizer in the hub's cache that a site has


@dataclass(frozen=True)
class Site:
    """Where a client runs: the API's root URL without /v1, the model's served name, the folder of
    its tokenizer, and an empty folder for what the client writes."""

    url: str
    model: str
    tokenizer: Path
    folder: Path


@dataclass(frozen=True)
class Said:
    """What a client's own report says. Means over its requests; `tpot_ms` is a request's time from
    the first to the last tokens divided by its tokens but one. None where it says nothing."""

    requests: int
    failed: int
    ttft_ms: float
    tpot_ms: float
    cached_share: float | None


@dataclass(frozen=True)
class Client:
    """One client under one load. `installs` are pip's arguments, one call each, into the virtual
    environment `venv`. `command` begins with the name of a program there. `read` takes the site's
    folder; it raises LookupError, OSError or ValueError for what is no report of this client.
    `ours` are arguments of `banyan bench run` for the same kind of load.
    """

    name: str
    venv: str
    installs: tuple[tuple[str, ...], ...]
    command: Callable[[Site], list[str]]
    read: Callable[[Path], Said]
    ours: tuple[str, ...]
