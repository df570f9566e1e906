"""The real model on real replicas through real routers, while nothing fails."""

from __future__ import annotations

import json
from itertools import takewhile

import pytest
from e2e_text import CHAT, SYSTEM, tie_or_equal

from banyan import Client
from banyan.channel import banyan_stub
from banyan.routers import Deadline

pytestmark = pytest.mark.timeout(280)


def test_status_from_any_shell(cluster) -> None:
    seen = json.loads(cluster.banyan("status", "--json").stdout)
    assert [r["name"] for r in seen["routers"]] == ["router-0", "router-1"]
    assert "token" not in seen["ray"]
    for state in seen["seen"].values():
        states = {r["replica"]: r["state"] for r in state["replicas"]}
        assert states == {"replica-0": "ready", "replica-1": "ready"}
    shown = cluster.banyan("status")
    assert shown.returncode == 0 and "replica-0" in shown.stdout and "ready" in shown.stdout


def test_second_turn_is_cached_but_for_what_is_new(cluster) -> None:
    with Client(cluster.record.addresses, timeout_s=120) as client:
        name = client.list_models()[0].name
        stub = banyan_stub(client.channel(client.routers.current))
        text = client.text_model(name, stub, Deadline(30))
        assert text is not None
        first = client.complete(CHAT, max_tokens=24)
        again = [*CHAT, {"role": "assistant", "content": first.text},
                 {"role": "user", "content": "And on Saturday?"}]  # fmt: skip
        second = client.complete(again, max_tokens=8)

    def encode(chat: list[dict[str, str]]) -> list[int]:
        return text.encode_chat([(m["role"], m["content"]) for m in chat])

    left = [*encode(CHAT), *first.token_ids][:-1]
    pairs = zip(left, encode(again), strict=False)
    shareable = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert shareable >= len(encode(CHAT))
    assert second.usage.cached_tokens == shareable
    assert second.usage.cached_tokens + second.usage.computed_tokens == second.usage.prompt_tokens
    assert second.replica == first.replica
    assert second.decision is not None
    assert second.decision.delivered_tokens == second.usage.cached_tokens


def test_no_cache_neither_reads_nor_feeds(cluster) -> None:
    chat = [{"role": "user", "content": "Say something about uncached rivers. " * 8}]
    with Client(cluster.record.addresses, timeout_s=120) as client:
        for _ in range(2):
            usage = client.complete(chat, max_tokens=2, no_cache=True).usage
            assert usage.cached_tokens == 0
        first = client.complete(chat, max_tokens=2)
        assert first.usage.cached_tokens < 40  # the template's own start may be there
        second = client.complete(chat, max_tokens=2)
        assert second.usage.computed_tokens == 1


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "seed": 11, "top_p": 0.95}, {"logprobs": 3}]
)
def test_direct_is_what_the_router_says(cluster, options) -> None:
    prompt = f"{SYSTEM}\nThe banyan — a fig tree 🌳 — is"
    with Client(cluster.record.addresses, timeout_s=120) as client:
        routed = client.complete(prompt, max_tokens=24, **options)
        direct = client.complete(prompt, max_tokens=24, direct=True, **options)
    assert direct.token_ids == routed.token_ids
    assert direct.text == routed.text
    assert direct.finish_reason == routed.finish_reason
    assert direct.usage.prompt_tokens == routed.usage.prompt_tokens
    assert direct.usage.completion_tokens == routed.usage.completion_tokens
    assert len(direct.logprobs_all[0]) == len(routed.logprobs_all[0])


def test_text_chat_and_token_ids_are_one_prompt(cluster) -> None:
    with Client(cluster.record.addresses, timeout_s=120) as client:
        name = client.list_models()[0].name
        stub = banyan_stub(client.channel(client.routers.current))
        text = client.text_model(name, stub, Deadline(30))
        assert text is not None
        ids = text.encode_chat([(m["role"], m["content"]) for m in CHAT])
        by_chat = client.complete(CHAT, max_tokens=12, logprobs=2)
        by_ids = client.complete(ids, max_tokens=12, logprobs=2)
    tie_or_equal(by_chat, by_ids)


def test_explain_tells_the_decision(cluster) -> None:
    done = cluster.banyan("generate", "--chat", "Hello there", "--max-tokens", "4", "--json")
    answer = json.loads(done.stdout)
    assert answer["usage"]["completion_tokens"] == 4 == len(answer["token_ids"])
    told = json.loads(cluster.banyan("explain", answer["request_id"], "--json").stdout)
    assert told["replica"] == answer["replica"]
    assert told["delivered_tokens"] == answer["usage"]["cached_tokens"]
    assert {c["replica"] for c in told["candidates"]} == {"replica-0", "replica-1"}
    dry = json.loads(cluster.banyan("explain", "--prompt", "Hello there", "--json").stdout)
    assert dry["reason"] and dry["delivered_tokens"] is None


def test_prompt_longer_than_the_context(cluster) -> None:
    done = cluster.banyan("generate", "word " * 12_000)
    assert done.returncode == 1 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ") and "context" in line


def test_second_up_is_refused(cluster) -> None:
    done = cluster.banyan("up", "--model", "fake:full", "--listen", "127.0.0.1:0")
    assert done.returncode == 1
    assert done.stderr.strip() == (
        "error: Cluster e2e is running already: `banyan down --name e2e` ends it."
    )
    assert json.loads(cluster.banyan("status", "--json").stdout)["phase"] == "running"
