"""The OpenAI gateway of a real cluster: the same text as over gRPC, and cached the second time."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from banyan import Client

pytestmark = pytest.mark.timeout(280)
PROMPT = "Once upon a time a banyan tree stood at the edge of a village, and under its canopy"


def post(address: str, path: str, body: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        reply = connection.getresponse()
        assert reply.status == 200
        return json.loads(reply.read())
    finally:
        connection.close()


def eventually(true: Callable[[], bool], within_s: float = 10.0) -> None:
    end_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.05)


def test_http_says_what_grpc_says(cluster) -> None:
    address = cluster.record.routers[0].http
    with Client(cluster.record.routers[0].listen, timeout_s=60) as client:
        wanted = client.complete(PROMPT, max_tokens=12, temperature=0).text
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    found = post(address, "/v1/completions", body)
    assert found["choices"][0]["text"] == wanted
    again = post(address, "/v1/completions", body)
    assert again["choices"] == found["choices"]
    usage = again["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    messages = [{"role": "user", "content": "Say hello."}]
    chat = {"messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True}
    choice = post(address, "/v1/chat/completions", chat)["choices"][0]
    tokens = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert tokens.startswith(choice["message"]["content"]) and choice["message"]["content"]


def test_the_admin_key_empties_every_cache(cluster) -> None:
    """Both replicas forget; what is asked next is computed anew, to the same text."""
    address = cluster.record.routers[0].http
    body = {"prompt": f"A reset. {PROMPT}", "max_tokens": 8, "temperature": 0}
    wanted = post(address, "/v1/completions", body)["choices"]
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("POST", "/reset_prefix_cache")
    assert connection.getresponse().status == 401
    connection.close()
    key = cluster.banyan("cache", "key").stdout.strip()
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("POST", "/reset_prefix_cache", headers={"Authorization": f"Bearer {key}"})
    reply = connection.getresponse()
    found = json.loads(reply.read())
    connection.close()
    assert reply.status == 200 and len(found["replicas"]) == 2
    assert sum(one["blocks"] for one in found["replicas"]) > 0
    for router in cluster.record.routers:
        with Client(router.listen, timeout_s=60) as client:
            eventually(lambda client=client: client.cluster_state().index_blocks == 0)
    again = post(address, "/v1/completions", body)
    assert again["choices"] == wanted
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    shown = json.loads(cluster.banyan("cache", "reset", "--json").stdout)
    assert sorted(one["replica"] for one in shown["replicas"]) == sorted(cluster.record.replicas)
