"""Banyan: a distributed, cache-aware serving cluster for large language models.

Nothing is imported eagerly: `from banyan import Client` loads the client on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from banyan.client import AsyncClient, Client
    from seams.errors import BanyanError

__version__ = "0.1.0"
__all__ = ["AsyncClient", "BanyanError", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("Client", "AsyncClient"):
        from banyan import client

        return getattr(client, name)
    if name == "BanyanError":
        from seams.errors import BanyanError

        return BanyanError
    raise AttributeError(f"module 'banyan' has no attribute {name!r}")
