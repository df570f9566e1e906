"""The OpenAI gateway of a real cluster: the same text as over gRPC, and cached the second time."""

from __future__ import annotations

import http.client
import json
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
