"""Huge texts whose callers have left: whoever comes next must not wait behind them."""

from __future__ import annotations

import asyncio
import threading

import grpc
import pytest
from loopback_cluster import cluster, prompt, run
from scripted_replica import Script

from banyan.v1 import api_pb2
from router.service import api
from router.text.model import TextModel

HUGE = api.HUGE_BYTES + 1


def test_abandoned_huge_texts_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    release, lock, running, most = threading.Event(), threading.Lock(), 0, 0
    real = api.tokenize

    def slow(request: api_pb2.GenerateRequest, text: TextModel | None) -> list[int]:
        nonlocal running, most
        if len(request.text) <= api.HUGE_BYTES:
            return real(request, text)
        with lock:
            running += 1
            most = max(most, running)
        release.wait(30)
        with lock:
            running -= 1
        return real(request, text)

    monkeypatch.setattr(api, "tokenize", slow)

    async def scenario() -> None:
        async with cluster(Script()) as c:
            calls = [c.generate(prompt("x" * HUGE), timeout_s=0.5) for _ in range(40)]
            left = await asyncio.gather(*calls)
            assert {answer.code for answer in left} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            later = prompt("x" * (api.THREAD_BYTES + 1))
            answer = await c.generate(later, timeout_s=5)
            assert answer.code is grpc.StatusCode.INVALID_ARGUMENT, "it waited behind the dead"
            assert most <= api.HUGE_MAX
            release.set()
            answer = await c.generate(prompt("x" * HUGE), timeout_s=5)
            assert answer.code is grpc.StatusCode.INVALID_ARGUMENT, "a place was not given back"
            await c.quiet()

    try:
        run(scenario())
    finally:
        release.set()
