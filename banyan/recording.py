"""A recorded run: conversations sent to a live cluster at set times, for `banyan simulate --fit`.

First some prompts one at a time, which show what a token costs alone; then the load. Prompts are
token ids without meaning, answers have a set length. What is written is simulate/fit.py's format.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banyan.client import AsyncClient
from banyan.events import Delta, Finished, Started
from kvstore.groups import DEFAULT_BLOCK_TOKENS
from seams.errors import InternalError, InvalidRequest
from simulate.workload import Grain, chats

PROBES = (32, 96, 192, 320, 448, 640, 896, 1200, 1500, 64, 256, 512)  # prompt tokens, alone
PROBE_OUTPUT = 24
VOCAB_MIN = 32000  # ids below are in every served vocabulary that this is for


@dataclass(frozen=True)
class Load:
    """The loaded part. `rate` in new users a second."""

    users: int = 24
    groups: int = 3
    turns: int = 3
    rate: float = 0.5
    seed: int = 1


@dataclass(frozen=True)
class _Prompt:
    at_s: float
    token_ids: tuple[int, ...]
    output_tokens: int
    alone: bool


def record(addresses: Sequence[str], api_key: str | None, load: Load, path: Path) -> int:
    """Send everything, write the run to `path`; returns how many requests it has. Raises what the
    cluster answers, and InvalidRequest before that if `path` cannot be written."""
    try:
        path.touch()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}.") from None
    written = asyncio.run(_record(list(addresses), api_key, load))
    path.write_text(json.dumps(written) + "\n")
    return len(written["requests"])


async def _record(addresses: list[str], api_key: str | None, load: Load) -> dict[str, Any]:
    async with AsyncClient(addresses, api_key=api_key) as client:
        state = await client.cluster_state()
        began_s = time.monotonic()
        requests = [await _ask(client, prompt, began_s) for prompt in _probes()]
        pause_s = time.monotonic() - began_s + 1.0
        prompts = _loaded(load, pause_s)
        requests += await asyncio.gather(*(_ask(client, prompt, began_s) for prompt in prompts))
    return {
        "replicas": len(state.replicas),
        "blocks": min(replica.blocks_total for replica in state.replicas),
        "block_tokens": DEFAULT_BLOCK_TOKENS,
        "requests": requests,
    }


def _probes() -> list[_Prompt]:
    """Prompts that share nothing with each other or with the load."""
    made, last = [], VOCAB_MIN
    for tokens in PROBES:
        made.append(_Prompt(0.0, tuple(range(last - tokens, last)), PROBE_OUTPUT, True))
        last -= tokens
    return made


def _loaded(load: Load, pause_s: float) -> list[_Prompt]:
    workload = chats(
        load.users, load.groups, load.turns, load.seed, grain=Grain(DEFAULT_BLOCK_TOKENS, 1),
        rate=load.rate, system_tokens=320, turn_tokens=48, output_tokens=24, think_s=12.0,
    )  # fmt: skip
    highest = max(max(request.cells) for request in workload.requests)
    if highest >= VOCAB_MIN - sum(PROBES):
        raise InvalidRequest("So many users need more token ids than a vocabulary has.")
    return [_Prompt(pause_s + r.at_s, r.cells, r.output_tokens, False) for r in workload.requests]


async def _ask(client: AsyncClient, prompt: _Prompt, began_s: float) -> dict[str, Any]:
    await asyncio.sleep(max(0.0, prompt.at_s - (time.monotonic() - began_s)))
    sent_s = time.monotonic()
    first_s, replica, finished = 0.0, "", None
    async for event in client.generate(
        list(prompt.token_ids), max_tokens=prompt.output_tokens, ignore_eos=True, temperature=0.0
    ):
        if isinstance(event, Delta) and event.token_ids and not first_s:
            first_s = time.monotonic()
        elif isinstance(event, Started):
            replica = event.replica
        elif isinstance(event, Finished):
            finished = event
    if finished is None or not first_s:
        raise InternalError("A stream ended without tokens or without its usage.")
    return {
        "at_s": sent_s - began_s,
        "token_ids": prompt.token_ids,
        "output_tokens": finished.usage.completion_tokens,
        "replica": replica,
        "cached_tokens": finished.usage.cached_tokens,
        "ttft_s": first_s - sent_s,
        "total_s": time.monotonic() - sent_s,
        "alone": prompt.alone,
    }
