"""GenerateResponses to OpenAI answers, and errors to error objects: tables."""

from __future__ import annotations

import json
from typing import Any

import pytest

from banyan.v1 import api_pb2, common_pb2
from router.gateway import requests
from router.gateway.answers import ANSWER_TOKENS_MAX, Answer, Chunks
from router.gateway.logprobs import LOGPROB_MIN
from router.gateway.problems import problem_of
from seams import errors
from seams.errors import BanyanError, InvalidRequest

R = api_pb2.GenerateResponse
STARTED = R(started=api_pb2.Started(request_id="id", model="m"))
FINISHED = R(
    finished=api_pb2.Finished(
        usage=common_pb2.Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=3)
    )
)


def delta(text: str, ids: list[int], choice: int = 0, **more: Any) -> R:
    return R(delta=api_pb2.Delta(choice=choice, token_ids=ids, text=text, **more))


def ended(reason: int, text: str = "", choice: int = 0) -> R:
    finished = api_pb2.ChoiceFinished(choice=choice, reason=reason, text=text)  # type: ignore[arg-type]
    return R(choice_finished=finished)


def events(body: dict[str, Any], responses: list[R], chat: bool) -> list[Any]:
    make = requests.chat if chat else requests.completion
    base = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    chunks = Chunks(make(base | {"stream": True} | body, {}), lambda name: None, 7)
    chunks.accepted("id")
    written = b"".join(chunks.events(0, response) for response in responses) + chunks.last()
    lines = [line.removeprefix(b"data: ") for line in written.split(b"\n\n")[:-1]]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


def test_a_chat_in_chunks() -> None:
    flow = [STARTED, delta("ab", [1, 2]), delta("", [3]), ended(3, "c"), FINISHED]
    found = events({"stream_options": {"include_usage": True}}, flow, chat=True)
    around = {"id": "chatcmpl-id", "object": "chat.completion.chunk", "created": 7, "model": "m"}
    assert all(chunk.items() >= around.items() for chunk in found)
    assert [chunk["choices"] for chunk in found] == [
        [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        [{"index": 0, "delta": {"content": "ab"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "c"}, "logprobs": None, "finish_reason": "length"}],
        [],
    ]
    assert found[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert found[-1]["usage"]["total_tokens"] == 8


def test_a_completion_in_chunks() -> None:
    flow = [STARTED, delta("ab", [1, 2]), delta("", [3]), ended(2), FINISHED]
    found = events({"return_token_ids": True}, flow, chat=False)
    assert [chunk["choices"][0].get("token_ids") for chunk in found] == [[1, 2], [3], None]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None, None, "stop"]
    assert all("usage" not in chunk for chunk in found)


@pytest.mark.parametrize(("reason", "said"), [(1, "stop"), (2, "stop"), (3, "length")])
def test_finish_reasons(reason: int, said: str) -> None:
    found = events({}, [STARTED, ended(reason), FINISHED], chat=True)
    assert found[-1]["choices"][0]["finish_reason"] == said


def test_logprobs_of_a_model_without_text_and_of_the_impossible() -> None:
    position = common_pb2.PositionLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=9, logprob=-1),
        top=[common_pb2.TokenLogprob(token_id=4, logprob=float("-inf"))],
    )
    flow = [STARTED, delta("", [9], logprobs=[position]), ended(3), FINISHED]
    found = events({"logprobs": True, "top_logprobs": 1}, flow, chat=True)
    entry = found[1]["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("token_id:9", None, -1)
    assert entry["top_logprobs"] == [{"token": "token_id:4", "bytes": None, "logprob": LOGPROB_MIN}]


def test_an_answer_that_is_too_long_for_one_piece() -> None:
    answer = Answer(requests.completion({"prompt": "x"}, {}), lambda name: None, 7)
    for _ in range(ANSWER_TOKENS_MAX // 1024):
        answer.add(0, delta("", [1] * 1024))
    with pytest.raises(InvalidRequest, match="stream"):
        answer.add(0, delta("", [1]))


def test_every_error_has_a_status_and_says_when_to_retry() -> None:
    wanted = {
        "InvalidRequest": (400, None),
        "PromptTooLong": (400, "context_length_exceeded"),
        "Unauthenticated": (401, "invalid_api_key"),
        "Forbidden": (403, "admin_key_required"),
        "ModelNotFound": (404, "model_not_found"),
        "RequestNotFound": (404, "request_not_found"),
        "Overloaded": (429, "rate_limit_exceeded"),
        "OutOfBlocks": (400, "out_of_blocks"),
        "NoReplica": (503, "no_replica"),
        "ReplicaLost": (503, "replica_lost"),
        "DeadlineExceeded": (504, "deadline_exceeded"),
        "Cancelled": (503, "cancelled"),
        "Incompatible": (500, None),
        "ModelLoadError": (500, None),
        "LaunchError": (500, None),
        "InternalError": (500, None),
    }
    leaves = {
        name: leaf
        for name, leaf in vars(errors).items()
        if isinstance(leaf, type) and issubclass(leaf, BanyanError) and leaf is not BanyanError
    }
    assert set(wanted) == set(leaves)
    for name, leaf in leaves.items():
        problem = problem_of(leaf("A sentence."))
        assert (problem.status, problem.code) == wanted[name]
        assert bool(problem.headers) == (problem.status in (429, 503))
        assert problem.body["error"]["message"] == "A sentence."


@pytest.mark.parametrize(
    ("message", "said", "param"),
    [
        ("Sampling.logit_bias names an id twice.", "logit_bias names an id twice.", "logit_bias"),
        ("GenerateRequest.stop has an empty string.", "stop has an empty string.", "stop"),
        ("TokenIds.ids must be at most 5.", "prompt must be at most 5.", "prompt"),
        ("The prompt is empty.", "The prompt is empty.", None),
    ],
)
def test_fields_go_by_the_names_that_clients_know(
    message: str, said: str, param: str | None
) -> None:
    problem = problem_of(InvalidRequest(message))
    assert (problem.message, problem.param) == (said, param)


def test_retry_after_is_what_the_error_says_in_whole_seconds() -> None:
    assert problem_of(errors.Overloaded("x.", retry_after_s=0.2)).headers == [("retry-after", "1")]
    assert problem_of(errors.Overloaded("x.", retry_after_s=6.6)).headers == [("retry-after", "7")]
