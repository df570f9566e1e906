"""The load test's two ways of running alternate, part by part, and each part is run both ways."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from banyan.client import AsyncClient
from loadtest import closed_loop
from loadtest.__main__ import parser
from loadtest.workload import Conversation, shared_prefix_chats


@pytest.mark.parametrize(("users", "concurrency"), [(1, 4), (8, 4), (10, 4)])
def test_parts_alternate(monkeypatch: pytest.MonkeyPatch, users: int, concurrency: int) -> None:
    ran: list[tuple[tuple[str, ...], bool]] = []

    async def run(
        _: AsyncClient, part: list[Conversation], *, no_cache: bool = False, **__: Any
    ) -> closed_loop.Run:
        ran.append((tuple(c.user for c in part), no_cache))
        done = (closed_loop.Measured(c.user, 0, "", 1, 0, 1, 0.1, 0.2, ()) for c in part)
        return closed_loop.Run(tuple(done), 2.0)

    monkeypatch.setattr(closed_loop, "run", run)
    chats = shared_prefix_chats(users, 2, 1, 5, 5, 1)
    client = cast("AsyncClient", None)
    cached, uncached = asyncio.run(
        closed_loop.alternate(client, chats, concurrency=concurrency, max_tokens=1)
    )
    parts = -(-users // concurrency)
    everyone = [c.user for c in chats]
    for result in (cached, uncached):
        assert [m.user for m in result.requests] == everyone
        assert result.wall_s == 2.0 * parts
    assert [no_cache for _, no_cache in ran] == ([True, False, False, True] * parts)[: 2 * parts]
    assert all(ran[i][0] == ran[i + 1][0] for i in range(0, len(ran), 2))


@pytest.mark.parametrize("given", ["0", "-1", "x", "1.5"])
def test_counts_are_at_least_one(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--address", "x", "--concurrency", given])
    assert "is not a number of 1 or more" in capsys.readouterr().err
