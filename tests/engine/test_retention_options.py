"""Retention from the command line and from a request to the engine, and its figures back."""

from pathlib import Path

import pytest

from banyan.cluster.spec import ClusterSpec, check
from banyan.v1 import common_pb2, internal_pb2
from banyan.wire import generate_request
from kvstore.keys import root
from seams.errors import InvalidRequest, LaunchError
from worker.config import ReplicaConfig
from worker.engine.messages import Compacted, EngineLoad
from worker.service.assemble import load_parts
from worker.service.convert import ServedRoot, heartbeat, submitted
from worker.service.settings import check_retention

ROOT = root("model", "", 16)


def config(**changes: object) -> ReplicaConfig:
    given = {"replica": "r", "model": "fake:full", "served_name": "m", "routers": ()}
    return ReplicaConfig(secret_file="", threads=1, **{**given, **changes})  # type: ignore[arg-type]


def test_a_request_names_its_policy() -> None:
    request = generate_request("text", retention="streaming:window=64")
    assert request.sampling.retention == "streaming:window=64"
    submit = internal_pb2.Submit(
        request_id="a", root_id=ROOT, token_ids=[1, 2], prompt_tokens=2, credit_tokens=9
    )
    submit.sampling.CopyFrom(request.sampling)
    submit.sampling.seed = 1
    served = {bytes(ROOT): ServedRoot(ROOT, 100, 50)}
    assert submitted(submit, "r0", served, 0.0).retention == "streaming:window=64"
    submit.sampling.retention = "x" * 257
    with pytest.raises(InvalidRequest, match=r"Sampling\.retention"):
        submitted(submit, "r0", served, 0.0)


def test_heartbeats_say_what_it_came_to() -> None:
    load = EngineLoad(blocks_low=3, compacted=Compacted(2, 256, 16, 4096))
    told = heartbeat(load, EngineLoad(), False, False).load
    assert told.blocks_low == 3 and told.retention_rounds == 2
    assert (told.retention_dropped_tokens, told.retention_freed_blocks) == (256, 16)
    assert told.retention_moved_bytes == 4096
    assert heartbeat(EngineLoad(), EngineLoad(), False, False).load.retention_rounds == 0


def test_a_replica_offers_what_it_is_told_to() -> None:
    for text, has_default in (("streaming:window=32", True), ("requests", False), ("none", False)):
        policies = load_parts(config(retention=text)).engine._core.retention  # type: ignore[attr-defined]
        assert (policies.default is not None) == has_default
    assert load_parts(config()).engine._core.retention is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"retention": "streaming:window=much"}, "--retention: streaming's window is a whole"),
        ({"retention": "triattention"}, "--retention: triattention needs a model whose keys"),
        ({"retention": "streaming", "model": "fake:window"}, "without sliding windows"),
        ({"retention": "streaming", "calibration": "/nowhere/c"}, "cannot be read"),
    ],
)
def test_what_a_replica_cannot_offer_ends_its_start(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        load_parts(config(**changes))


def test_the_command_line_is_checked_before_anything_starts(tmp_path: Path) -> None:
    check(ClusterSpec("demo", retention="streaming:sinks=4,window=1024"))
    with pytest.raises(LaunchError, match="--retention: A retention policy is one of none"):
        check(ClusterSpec("demo", retention="h2o"))
    with pytest.raises(LaunchError, match="--calibration: there is no file"):
        check(ClusterSpec("demo", calibration=str(tmp_path / "none")))
    with pytest.raises(InvalidRequest, match="written NAME or NAME:KEY=VALUE"):
        check_retention("streaming:window")


def test_what_answers_depend_on_is_part_of_the_numeric_class() -> None:
    """A stream that moves goes on at a replica that prunes alike, if there is one."""
    wide, narrow, again = (
        load_parts(config(retention=f"streaming:window={window}")).spec.numeric_class
        for window in (64, 32, 64)
    )
    plain, asked = load_parts(config()), load_parts(config(retention="requests"))
    assert wide == again != narrow
    assert plain.spec.numeric_class == asked.spec.numeric_class == "fake"


def test_the_wire_knows_the_field() -> None:
    assert common_pb2.Sampling().retention == ""
