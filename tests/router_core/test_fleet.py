"""Attach and its parity check, epochs, leases, links, draining; what the fleet serves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from router_core_world import (
    BLOCK,
    MODEL,
    STORED,
    attach_ready,
    batch_of,
    hello_of,
    keys_of,
    new_core,
    op_of,
    prompt,
    request_of,
    served,
    snapshot_of,
)

from banyan.v1 import common_pb2, internal_pb2
from kvstore.keys import ChainSpec, RootId, chain, root
from router.core import RouterCore
from router.placement import Observed
from seams.clock import VirtualClock
from seams.errors import Incompatible, NoReplica

LEASE_S = 5.0
BEAT = internal_pb2.Heartbeat()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def core(clock: VirtualClock) -> RouterCore:
    return new_core(clock, lease_s=LEASE_S)


def states(core: RouterCore) -> dict[str, str]:
    return {state.replica: state.state for state in core.state()}


def _protocol(hello: internal_pb2.Hello) -> None:
    hello.protocol = 2


def _no_models(hello: internal_pb2.Hello) -> None:
    del hello.models[:]


def _same_name_twice(hello: internal_pb2.Hello) -> None:
    hello.models.append(hello.models[0])


def _other_root(hello: internal_pb2.Hello) -> None:
    hello.models[0].root_id = b"x" * 32


def _other_block_size(hello: internal_pb2.Hello) -> None:
    hello.block_tokens = 2 * BLOCK


def _adapter_forgotten(hello: internal_pb2.Hello) -> None:
    hello.models[0].adapter_fingerprint = "adapter-1"


def _probe_of_another_root(hello: internal_pb2.Hello) -> None:
    hello.probe.root_id = root("weights-2", "", BLOCK)


def _no_probe(hello: internal_pb2.Hello) -> None:
    hello.probe.Clear()


def _probe_too_short(hello: internal_pb2.Hello) -> None:
    del hello.probe.token_ids[BLOCK - 1 :]
    hello.probe.keys = b""


def _wrong_key(hello: internal_pb2.Hello) -> None:
    hello.probe.keys = hello.probe.keys[:-1] + b"\0"


def _key_missing(hello: internal_pb2.Hello) -> None:
    hello.probe.keys = hello.probe.keys[:-16]


def _salt_ignored(hello: internal_pb2.Hello) -> None:
    spec = ChainSpec(RootId(hello.probe.root_id), BLOCK)
    hello.probe.keys = b"".join(chain(spec, hello.probe.token_ids))


def _salt_from_the_start(hello: internal_pb2.Hello) -> None:
    spec = ChainSpec(RootId(hello.probe.root_id), BLOCK, hello.probe.salt)
    hello.probe.keys = b"".join(chain(spec, hello.probe.token_ids))


DIFFERENCES = [
    _protocol,
    _no_models,
    _same_name_twice,
    _other_root,
    _other_block_size,
    _adapter_forgotten,
    _probe_of_another_root,
    _no_probe,
    _probe_too_short,
    _wrong_key,
    _key_missing,
    _salt_ignored,
    _salt_from_the_start,
]


@pytest.mark.parametrize("differ", DIFFERENCES, ids=lambda change: change.__name__)
def test_any_parity_difference_refuses_the_replica(
    core: RouterCore, differ: Callable[[internal_pb2.Hello], None]
) -> None:
    hello = hello_of("r1")
    differ(hello)
    with pytest.raises(Incompatible) as refusal:
        core.attach(hello)
    assert str(refusal.value).endswith(".") and "weights-1" not in str(refusal.value)
    assert core.state() == [] and core.models() == {}
    core.attach(hello_of("r1"))  # unchanged, it is accepted
    assert states(core) == {"r1": "ready"}


def _weights(model: internal_pb2.ServedModel) -> None:
    model.model_fingerprint = "weights-2"
    model.root_id = root("weights-2", "", BLOCK)


def _tokenizer(model: internal_pb2.ServedModel) -> None:
    model.tokenizer_fingerprint = "tokenizer-2"


def _template(model: internal_pb2.ServedModel) -> None:
    model.template_fingerprint = "template-2"


@pytest.mark.parametrize("differ", [_weights, _tokenizer, _template])
def test_one_name_means_one_model_in_the_whole_fleet(
    core: RouterCore, clock: VirtualClock, differ: Callable[[internal_pb2.ServedModel], None]
) -> None:
    core.attach(hello_of("r1"))
    other = served()
    differ(other)
    with pytest.raises(Incompatible, match="r2 serves model demo with another"):
        core.attach(hello_of("r2", models=[other]))
    other.name = "elsewhere"
    core.attach(hello_of("r2", models=[other]))  # under another name it is welcome
    core.attach(hello_of("r1", epoch=2, models=[served(), other]))


def test_a_fleet_that_left_does_not_forbid_a_new_version(
    core: RouterCore, clock: VirtualClock
) -> None:
    core.attach(hello_of("r1"))
    core.link_lost("r1", 1)
    other = served(fingerprint="weights-2")
    core.attach(hello_of("r2", models=[other]))
    assert core.models()[MODEL].served.root_id == other.root_id, "the ready one counts"


def test_a_newer_epoch_takes_over_and_an_older_one_is_refused(
    core: RouterCore, clock: VirtualClock
) -> None:
    attach_ready(core, "r1")
    core.events(batch_of("r1", 1, op_of(STORED, keys_of(prompt(1, 4)))))
    core.place(request_of("q1", prompt(2, 40)))
    assert core.attach(hello_of("r1", epoch=1)) == [], "the same start said hello again"
    assert core.preview(request_of("q", prompt(1, 4))).available_tokens > 0
    assert core.attach(hello_of("r1", epoch=3)) == ["r1"]
    core.check_integrity()
    fresh = core.preview(request_of("q", prompt(1, 4)))
    assert fresh.available_tokens == 0
    assert fresh.candidates[0].terms[0].seconds == 0, "the old epoch's bookings weigh nothing"
    with pytest.raises(Incompatible):
        core.attach(hello_of("r1", epoch=2))
    core.finished("q1", 0, Observed())  # the orphan's end is taken note of and changes nothing
    assert core.explain("q1") is not None
    core.check_integrity()


def test_heartbeats_of_another_epoch_are_ignored(core: RouterCore) -> None:
    core.attach(hello_of("r1", epoch=2))
    load = internal_pb2.Load(running=7)
    core.heartbeat("r1", 1, internal_pb2.Heartbeat(load=load, draining=True))
    core.heartbeat("r9", 1, BEAT)
    core.link_lost("r1", 1)
    assert states(core) == {"r1": "ready"} and core.state()[0].running == 0


def test_a_lost_link_makes_suspect_at_once_and_gone_after_the_lease(
    core: RouterCore, clock: VirtualClock
) -> None:
    attach_ready(core, "r1", "r2")
    core.events(batch_of("r1", 1, op_of(STORED, keys_of(prompt(1, 4)))))
    core.link_lost("r1", 1)
    assert states(core) == {"r1": "suspect", "r2": "ready"}
    assert core.place(request_of("q1", prompt(1, 4))).replica == "r2", "the holder is suspect"
    for _ in range(10):
        clock.advance(LEASE_S / 10)
        core.heartbeat("r2", 1, BEAT)
    assert core.tick() == []
    clock.advance(0.01)
    assert core.tick() == [("r1", 1)]
    assert states(core) == {"r2": "ready"}
    core.failed("q1")
    for _ in range(300):
        assert core.tick() == []
    assert core.index_blocks == 0, "blocks of the gone are swept out"
    core.check_integrity()


def test_missed_heartbeats_make_suspect_and_the_next_one_ready(
    core: RouterCore, clock: VirtualClock
) -> None:
    core.attach(hello_of("r1"))
    clock.advance(LEASE_S * 0.6)
    assert states(core) == {"r1": "suspect"}
    core.heartbeat("r1", 1, BEAT)
    assert states(core) == {"r1": "ready"}


def test_a_reconnect_during_the_lease_keeps_blocks_and_bookings(
    core: RouterCore, clock: VirtualClock
) -> None:
    attach_ready(core, "r1")
    core.events(batch_of("r1", 1, op_of(STORED, keys_of(prompt(1, 4)))))
    core.place(request_of("q1", prompt(1, 4)))
    core.link_lost("r1", 1)
    assert core.attach(hello_of("r1")) == []
    assert states(core) == {"r1": "ready"}
    assert core.preview(request_of("q", prompt(1, 4))).available_tokens == 4 * BLOCK - 1
    core.finished("q1", 63, Observed())
    core.check_integrity()


def test_a_gone_replica_that_returns_in_the_same_epoch_starts_empty(
    core: RouterCore, clock: VirtualClock
) -> None:
    attach_ready(core, "r1")
    core.events(batch_of("r1", 1, op_of(STORED, keys_of(prompt(1, 4)))))
    core.place(request_of("q1", prompt(1, 8)))
    clock.advance(LEASE_S + 1)
    assert core.tick() == [("r1", 1)]
    core.attach(hello_of("r1"))
    assert core.held_blocks("r1") == {}
    assert core.events(batch_of("r1", 2)), "it has to send a snapshot"
    core.first_token("q1")
    core.failed("q1")  # of the life before
    core.check_integrity()
    assert not core.events(snapshot_of("r1", 2, keys_of(prompt(1, 4))))
    assert core.preview(request_of("q", prompt(1, 4))).available_tokens > 0


def test_draining_and_stalled_replicas_get_nothing_new(core: RouterCore) -> None:
    attach_ready(core, "r1", "r2")
    core.heartbeat("r1", 1, internal_pb2.Heartbeat(draining=True))
    core.heartbeat("r2", 1, internal_pb2.Heartbeat(load=internal_pb2.Load(stalled=True)))
    assert states(core) == {"r1": "draining", "r2": "suspect"}
    with pytest.raises(NoReplica):
        core.place(request_of("q1", prompt(1, 4)))
    core.heartbeat("r1", 1, BEAT)
    core.heartbeat("r2", 1, BEAT)
    assert states(core) == {"r1": "draining", "r2": "suspect"}, "it has not stepped since"
    assert core.place(request_of("q1", prompt(1, 4))).replica == "r2", "nobody else serves"
    stepped = internal_pb2.Load(steps=BEAT.load.steps + 1)
    core.heartbeat("r2", 1, internal_pb2.Heartbeat(load=stepped))
    assert states(core) == {"r1": "draining", "r2": "ready"}, "draining is final"
    with pytest.raises(NoReplica):
        core.place(request_of("q2", prompt(1, 4), excluded=frozenset({"r2"})))


def test_models_are_those_of_the_fleet(core: RouterCore, clock: VirtualClock) -> None:
    assert core.models() == {}
    with pytest.raises(NoReplica):
        core.preview(request_of("q", prompt(1, 4)))
    adapter = served("demo:poet")
    adapter.adapter_fingerprint = "poet-1"
    adapter.root_id = root("weights-1", "poet-1", BLOCK)
    core.attach(hello_of("r1", models=[served(), adapter]))
    short = served()
    short.context_tokens = 4096
    core.attach(hello_of("r2", models=[short]))
    entries = core.models()
    assert set(entries) == {"demo", "demo:poet"}
    assert entries["demo"].replicas == ("r1", "r2")
    assert entries["demo"].served.context_tokens == 4096, "a stream must fit wherever it moves"
    assert entries["demo:poet"].replicas == ("r1",)
    core.attach(hello_of("r1"))  # the adapter is unloaded
    assert set(core.models()) == {"demo"}
    core.link_lost("r1", 1)
    core.link_lost("r2", 1)
    assert core.models()["demo"].replicas == ()


def test_a_request_goes_only_to_who_serves_its_root(core: RouterCore) -> None:
    adapter = served("demo:poet")
    adapter.adapter_fingerprint = "poet-1"
    adapter.root_id = root("weights-1", "poet-1", BLOCK)
    core.attach(hello_of("r1"))
    core.attach(hello_of("r2", models=[served(), adapter]))
    tokens = prompt(1, 4)
    for number in range(20):
        request = dataclasses.replace(
            request_of(f"q{number}", tokens),
            model="demo:poet",
            root_id=RootId(adapter.root_id),
            keys=keys_of(tokens, root_id=RootId(adapter.root_id)),
        )
        assert core.place(request).replica == "r2"
    with pytest.raises(NoReplica):
        core.place(dataclasses.replace(request, request_id="q", root_id=RootId(b"x" * 32)))


def test_cluster_state_tells_what_the_replica_reported(
    core: RouterCore, clock: VirtualClock
) -> None:
    attach_ready(core, "r1")
    core.events(batch_of("r1", 1, op_of(STORED, keys_of(prompt(1, 4)))))
    load = internal_pb2.Load(
        running=2,
        waiting=3,
        blocks_total=100,
        blocks_free=50,
        blocks_cached=20,
        prompt_tokens=400,
        cached_tokens=100,
        steps=9,
        tiers=[common_pb2.TierLoad(tier="host", bytes=5, logical_bytes=9)],
    )
    core.heartbeat("r1", 1, internal_pb2.Heartbeat(load=load))
    clock.advance(0.5)
    state = core.state()[0]
    assert (state.running, state.waiting, state.steps) == (2, 3, 9)
    assert (state.blocks_total, state.blocks_free, state.blocks_cached) == (100, 50, 20)
    assert [(t.tier, t.bytes, t.logical_bytes) for t in state.tiers] == [("host", 5, 9)]
    assert (state.hit_share, state.blocks_indexed, state.heartbeat_age_s) == (0.25, 4, 0.5)
    assert list(state.models) == [MODEL] and state.address == "r1:1"
    assert core.index_blocks == 4
