"""Malformed bodies: whatever JSON arrives is answered with 200 or 4xx, and nothing is left behind.

`GATEWAY_FUZZ_SEED` and `GATEWAY_FUZZ_BODIES` repeat a run or make it longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from typing import Any

from http_calls import connected
from loopback_cluster import cluster
from scripted_replica import Script

from router.gateway import fields, requests

BODIES = int(os.environ.get("GATEWAY_FUZZ_BODIES", "2000"))
CLIENTS = 8
BASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 4}),
    ("/v1/completions", {"prompt": [[104, 105], [104]], "n": 2, "max_tokens": 4}),
    ("/tokenize", {"prompt": "hi"}),
    ("/detokenize", {"tokens": [104, 105]}),
]
NAMES = sorted({name for table in fields.TABLES for name in table} | set(requests.REFUSED))
NUMBERS: list[Any] = [0, -1, 1, 2, 7, 255, 299, 300, 10**40, 0.0, -0.0, 0.5, 1.0, 1e-9, 1e308]
NUMBERS += [2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 1e30, -1e308]
TEXTS: list[Any] = ["", "a", "hi", "\x00", "é\u2028😀", "x" * 300, "x" * 3000, "true", "NaN"]
LISTS: list[Any] = [[], [[]], [[], []], [None], [1, "a"], ["a", "b"], [104, 105], [[104], [105]]]
LISTS += [[{"role": "user", "content": "x"}], [{"role": "system"}], [{"type": "function"}]]
LISTS += [[{"role": "user", "content": [{"type": "text", "text": "x"}]}]]
OBJECTS: list[Any] = [{}, {"a": 1}, {"104": 5}, {"104": "x"}, {"-1": 1}, {"type": "text"}]
OBJECTS += [{"include_usage": True}, {"role": "user"}]
ODD = [None, True, False, *NUMBERS, *TEXTS, *LISTS, *OBJECTS]


def mutated(rng: random.Random) -> tuple[str, bytes]:
    """A good body with some things wrong, most often still JSON."""
    path, base = rng.choice(BASES)
    body: dict[str, Any] = json.loads(json.dumps(base))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 8])):
        fate = rng.random()
        if fate < 0.6:
            body[rng.choice(NAMES)] = value(rng)
        elif fate < 0.8 and body:
            body[rng.choice(sorted(body))] = value(rng)
        elif body:
            del body[rng.choice(sorted(body))]
    raw = json.dumps(body).encode()
    fate = rng.random()
    if fate < 0.1:
        cut = rng.randrange(len(raw) + 1)
        return path, raw[:cut] + bytes(rng.randrange(256) for _ in range(rng.randrange(4)))
    if fate < 0.2:
        at = rng.randrange(len(raw))
        return path, raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :]
    if fate < 0.23:
        return path, rng.choice([b"", b"[]", b"7", b'"x"', b"null", b"[" * 3000, b'{"a":' * 3000])
    return path, raw


def value(rng: random.Random, depth: int = 0) -> Any:
    fate = rng.random()
    if depth < 3 and fate < 0.1:
        return [value(rng, depth + 1) for _ in range(rng.randrange(5))]
    if depth < 3 and fate < 0.2:
        names = [*NAMES, "role", "content", "type", "text", "0", "104"]
        return {rng.choice(names): value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(ODD)


def test_no_body_is_our_fault_and_nothing_leaks() -> None:
    seed = int(os.environ.get("GATEWAY_FUZZ_SEED", random.SystemRandom().randrange(1 << 32)))
    print(f"GATEWAY_FUZZ_SEED={seed} GATEWAY_FUZZ_BODIES={BODIES}")
    rng = random.Random(seed)
    bodies = [mutated(rng) for _ in range(BODIES)]
    statuses: Counter[int] = Counter()

    async def client(address: str, mine: list[tuple[str, bytes]]) -> None:
        async with connected(address) as connection:
            for path, body in mine:
                await connection.ask("POST", path, body)
                reply = await connection.reply()
                statuses[reply.status] += 1
                assert 200 <= reply.status < 500, (reply.status, path, body[:2000], reply.body)
                if reply.status >= 400:
                    assert reply.error["type"] == "invalid_request_error" or reply.status == 404
                if reply.headers.get("connection") == "close":
                    raise AssertionError("an error of the body ended the connection")

    async def scenario() -> None:
        script = Script(end_after=3, tokens_per_frame=4)
        async with cluster(script, http="127.0.0.1:0", lease_ms=60_000) as running:
            address = running.server.http
            await asyncio.sleep(0)
            running.server._api._started_s -= 61  # unknown models need no waiting for
            clients = [client(address, bodies[i::CLIENTS]) for i in range(CLIENTS)]
            await asyncio.gather(*clients)
            await running.quiet()
            api, replica = running.server._api, running.replicas[0]
            assert api._calls == 0 and running.server._gateway._bodies._bytes == 0
            await running.until(lambda: not running.server._gateway._connections)
            ended = [run for run in replica.runs.values() if run.task and run.task.done()]
            assert len(ended) == len(replica.runs), "a replica still works for nobody"

    asyncio.run(asyncio.wait_for(scenario(), 240))
    print(dict(statuses))
    assert statuses[200] > BODIES / 20 and statuses[400] > BODIES / 4
