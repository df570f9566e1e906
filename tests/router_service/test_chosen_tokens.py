"""Logit bias and allowed tokens from the client to the sampler: a router and a worker (FakeModel)
as processes, streams through the router and direct ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import grpc.aio
import pytest
import torch
from test_router_process import QUIET, start, wait_ready, write_config
from test_with_workers import Processes, ready

from banyan import AsyncClient, Client
from banyan.events import Completion, FinishReason
from banyan.v1 import api_pb2_grpc
from seams.errors import InvalidRequest
from worker.models.fake import fake_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 5
TOKENS = 24
VOCAB, EOS = 256, 255
ALLOWED = (7, 30, 31, 200)
HOT = {"temperature": 1.5, "seed": 5, "n": 2, "logprobs": 2}
TOLERANCE = 1e-5  # of a log-softmax of 256 float32 logits below 8: some ulp


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("cluster")
    router = start(write_config(folder, queue_wait_s_max=60.0), *QUIET)
    running = Processes(folder, wait_ready(folder, router), {})
    listen: str = running.router["listen"]
    running.start_worker("w0")

    async def attached() -> None:
        async with grpc.aio.insecure_channel(listen) as channel:
            await ready(api_pb2_grpc.BanyanStub(channel), 1)

    try:
        asyncio.run(attached())
        yield listen
    finally:
        running.workers["w0"].terminate()
        running.workers["w0"].wait(30)
        router.terminate()
        router.communicate(timeout=30)


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout_s=60) as made:
        yield made


def complete(client: Client, prompt: Sequence[int] = PROMPT, **options: Any) -> Completion:
    return client.complete(prompt, **{"max_tokens": TOKENS, "ignore_eos": True} | options)


def greedy(bias: dict[int, float], allowed: Sequence[int] = range(VOCAB)) -> tuple[int, ...]:
    """The largest of the allowed logits with their bias, one token after another."""
    model, tokens = fake_model("full"), list(PROMPT)
    for _ in range(TOKENS):
        logits = model.oracle_logits(tokens)
        tokens.append(min(allowed, key=lambda t: (-(float(logits[t]) + bias.get(t, 0.0)), t)))
    return tuple(tokens[len(PROMPT) :])


def check_logprobs(answer: Completion) -> None:
    """They are the model's own, whatever bias and mask made of the choice."""
    model = fake_model("full")
    for ids, given in zip(answer.token_ids_all, answer.logprobs_all, strict=True):
        for at, entry in enumerate(given):
            raw = model.oracle_logits([*PROMPT, *ids[:at]]).log_softmax(dim=-1)
            assert entry.token_id == ids[at]
            assert entry.logprob == pytest.approx(float(raw[ids[at]]), abs=TOLERANCE)
            expected = torch.sort(raw, descending=True, stable=True)
            assert [value for _, value in entry.top] == pytest.approx(
                expected.values[:2].tolist(), abs=TOLERANCE
            )
        assert len(given) == len(ids)


@pytest.mark.parametrize("direct", [False, True])
def test_a_bias_of_100_forces_a_token(client: Client, direct: bool) -> None:
    for options in ({}, HOT, {"repetition_penalty": 2.0, "frequency_penalty": 2.0}):
        answer = complete(client, logit_bias={17: 100}, direct=direct, **options)
        assert answer.token_ids_all == ((17,) * TOKENS,) * int(options.get("n", 1))
        if options is HOT:
            check_logprobs(answer)


@pytest.mark.parametrize("direct", [False, True])
def test_a_bias_of_minus_100_bans_a_token(client: Client, direct: bool) -> None:
    plain = complete(client, direct=direct)
    assert plain.token_ids_all == (greedy({}),)
    banned = dict.fromkeys(plain.token_ids_all[0], -100.0)
    answer = complete(client, logit_bias=banned, direct=direct)
    assert answer.token_ids_all == (greedy(banned),)
    assert not banned.keys() & set(answer.token_ids_all[0])
    hot = complete(
        client, logit_bias=dict.fromkeys(range(0, VOCAB, 2), -100.0), direct=direct, **HOT
    )
    assert all(token % 2 for ids in hot.token_ids_all for token in ids)
    check_logprobs(hot)


@pytest.mark.parametrize("direct", [False, True])
def test_only_allowed_tokens_are_chosen(client: Client, direct: bool) -> None:
    answer = complete(client, allowed_token_ids=ALLOWED, direct=direct)
    assert answer.token_ids_all == (greedy({}, ALLOWED),)
    hot = complete(client, allowed_token_ids=ALLOWED, direct=direct, **HOT)
    first, second = hot.token_ids_all
    assert {*first, *second} == set(ALLOWED) and first != second
    check_logprobs(hot)


def test_bias_works_among_the_allowed_and_lets_in_no_other(client: Client) -> None:
    bias = {30: 100.0, 40: 100.0}
    answer = complete(client, allowed_token_ids=ALLOWED, logit_bias=bias, temperature=1.0)
    assert answer.token_ids_all == ((30,) * TOKENS,)
    bias = {7: 1.5, 200: -2.0}
    answer = complete(client, allowed_token_ids=ALLOWED, logit_bias=bias)
    assert answer.token_ids_all == (greedy(bias, ALLOWED),) != (greedy({}, ALLOWED),)


def test_an_allowed_end_ends_the_choice_after_min_tokens(client: Client) -> None:
    options = {"ignore_eos": False, "logit_bias": {EOS: 100.0}, "allowed_token_ids": [EOS, 7]}
    for least in (0, 5):
        answer = complete(client, min_tokens=least, **options)
        assert answer.token_ids_all == ((*(7,) * least, EOS),)
        assert answer.finish_reason is FinishReason.STOP


def test_the_async_client_sends_both(address: str, client: Client) -> None:
    options: dict[str, Any] = {"logit_bias": {30: 0.5}, "allowed_token_ids": ALLOWED, **HOT}
    options |= {"max_tokens": TOKENS, "ignore_eos": True}

    async def scenario(direct: bool) -> Completion:
        async with AsyncClient(address, timeout_s=60) as other:
            return await other.complete(PROMPT, direct=direct, **options)

    expected = complete(client, **options)
    for direct in (False, True):
        answer = asyncio.run(scenario(direct))
        assert answer.token_ids_all == expected.token_ids_all
        assert answer.logprobs_all == expected.logprobs_all


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bias outside": ({"logit_bias": {VOCAB: 1.0}}, "Sampling.logit_bias has an id outside"),
    "bias too large": ({"logit_bias": {3: 100.5}}, "TokenBias.bias must be at most"),
    "bias too small": ({"logit_bias": {3: -101.0}}, "TokenBias.bias must be at least"),
    "bias no number": ({"logit_bias": {3: float("nan")}}, "TokenBias.bias must be"),
    "biases": ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "Sampling.logit_bias is larger"),
    "allowed outside": ({"allowed_token_ids": [3, VOCAB]}, "allowed_token_ids has an id outside"),
    "allowed": ({"allowed_token_ids": [3] * 65537}, "Sampling.allowed_token_ids is larger"),
    "nothing left": (
        {"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": False},
        "Sampling.min_tokens forbids all",
    ),
}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    client: Client, name: str, direct: bool
) -> None:
    options, sentence = REFUSED[name]
    with pytest.raises(InvalidRequest, match=sentence) as caught:
        complete(client, direct=direct, **options)
    assert caught.value.message.endswith(".") and caught.value.message.count(". ") == 0
    assert complete(client, max_tokens=2).token_ids_all == (greedy({})[:2],)
