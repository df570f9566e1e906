"""Fifty prompts through a router and two replicas give what transformers' greedy gives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from exact_prompts import OUTPUT, PROMPTS, exact_prompts
from oracle import GreedyOracle

from banyan import AsyncClient

pytestmark = pytest.mark.timeout(600)


def test_greedy_over_two_replicas_is_transformers_greedy(cluster, demo_model: Path) -> None:
    prompts = exact_prompts(demo_model)
    slots = asyncio.Semaphore(12)

    async def ask(client: AsyncClient, prompt: tuple[int, ...]) -> object:
        async with slots:
            return await client.complete(list(prompt), max_tokens=OUTPUT, ignore_eos=True)

    async def ask_all() -> list[object]:
        async with AsyncClient(cluster.record.addresses, timeout_s=500) as client:
            return await asyncio.gather(*(ask(client, p) for p in prompts))

    done = asyncio.run(ask_all())
    oracle = GreedyOracle(demo_model)
    ties, cached, picked = [], 0, set()
    for index, (prompt, completion) in enumerate(zip(prompts, done, strict=True)):
        usage = completion.usage
        assert usage.prompt_tokens == len(prompt)
        assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
        assert len(completion.token_ids) == OUTPUT
        ties += oracle.ties(index, prompt, completion.token_ids)
        cached += usage.cached_tokens
        picked.add(completion.replica)
    print(f"\n{PROMPTS} x {OUTPUT} over {sorted(picked)}: {len(ties)} ties, cached {cached}")
    print("\n".join(map(str, ties)))
    assert len(picked) == 2
    assert cached > 0
