"""A replica's tiers: opened where they can be had, left out with a warning where not, and told."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from service_peers import FakeRouter, StartReplica, eventually

from banyan.v1 import internal_pb2
from kvstore.fetch import Level
from kvstore.tiers.base import BlockName, Status, TierStats
from kvstore.tiers.embedded import EmbeddedValkey
from kvstore.tiers.nvme import open_folder
from kvstore.tiers.queue import StoreJob
from seams.errors import InvalidRequest, LaunchError
from seams.limits import check_message
from seams.urls import has_password, read_url, without_password
from worker.config import ReplicaConfig
from worker.models.fake import fake_model
from worker.service import tiers
from worker.service.settings import parse_config

SPEC = fake_model("full").spec
DEAD = "redis://127.0.0.1:1/0"  # nobody listens there


def config(**fields: Any) -> ReplicaConfig:
    given = {
        "replica": "replica-0",
        "model": "fake:full",
        "served_name": "fake",
        "routers": ("127.0.0.1:1",),
        "secret_file": "unused",
        "host_gib": 0.01,
    } | fields
    return parse_config(given)


# ---- the configuration --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"host_gib": -1}, "needs host_gib of at least 0."),
        ({"host_gib": math.nan}, "needs host_gib of at least 0."),
        ({"nvme": "/d", "nvme_gib": math.inf}, "needs nvme_gib of at least 0."),
        ({"nvme": "/d"}, "has one of nvme and nvme_gib alone."),
        ({"nvme_gib": 1}, "has one of nvme and nvme_gib alone."),
        ({"nvme": "/d", "nvme_gib": 1, "replica": "../x"}, "one that a folder can have."),
        ({"redis": DEAD, "namespace": "a:*"}, "With redis namespace must be letters"),
        ({"redis": DEAD, "redis_ttl_s": 0}, "needs redis_ttl_s of at least 1."),
        ({"cache": False}, "and cache is off."),
        ({"cold_codec": "zip"}, "The cold codec must be none, fp8 or turboquant4."),
        ({"cold_codec": "fp8", "batch_invariant": True}, "not with batch-invariant serving."),
        ({"cold_codec": "turboquant4", "batch_invariant": True}, "rounds what it stores, so"),
        ({"kv_codec": "turboquant:k9v9"}, "The KV codec must be model, fp8, turboquant:kAvB"),
        ({"kv_codec": "oscar"}, "needs a calibration of the model"),
        (
            {"kv_codec": "oscar", "calibration": "file", "retention": "streaming"},
            "one of the two, not both.",
        ),
        ({"kv_codec": "oscar", "batch_invariant": True}, "not with batch-invariant serving."),
        ({"kv_codec": "fp8", "cold_codec": "fp8"}, "the cold codec must be none."),
    ],
)
def test_a_bad_configuration_is_one_sentence(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        config(**fields)
    assert expected in raised.value.message and raised.value.message.endswith(".")


def test_a_url_is_read_from_a_private_file_and_shown_without_its_password(tmp_path: Path) -> None:
    url = "rediss://user:very-secret@cache.example:6380/2?ssl_cert_reqs=required"
    file = tmp_path / "url"
    file.write_text(f"{url}\n")
    file.chmod(0o644)
    with pytest.raises(LaunchError, match="chmod 600") as raised:
        read_url(f"@{file}")
    assert "very-secret" not in raised.value.message
    file.chmod(0o440)
    assert read_url(f"@{file}") == url and read_url(url) == url
    assert without_password(url) == "rediss://cache.example:6380/2"
    assert without_password("unix://:pw@/run/v.sock") == "unix:///run/v.sock"
    assert has_password(url) and has_password("redis://h/0?password=x")
    assert not has_password("redis://user@h:1/0")
    with pytest.raises(LaunchError, match="cannot be read"):
        read_url(f"@{tmp_path / 'none'}")


# ---- opening ------------------------------------------------------------------------------------


def test_no_tier_is_opened_unless_asked_for() -> None:
    assert tiers.open_tiers(config(host_gib=0.0), SPEC) is None


def test_all_tiers_open(tmp_path: Path) -> None:
    with EmbeddedValkey(16 << 20) as server:
        asked = config(nvme=str(tmp_path), nvme_gib=0.05, redis=server.url)
        store = tiers.open_tiers(asked, SPEC)
        assert store is not None
        assert set(store.lower) == {Level.DISK, Level.SHARED}
        assert (tmp_path / "replica-0").stat().st_mode & 0o777 == 0o700
        with pytest.raises(LaunchError, match="in use"):
            open_folder(tmp_path / "replica-0")
        store.close()
    open_folder(tmp_path / "replica-0").close()


def test_lower_tiers_bring_their_own_host_memory(tmp_path: Path) -> None:
    store = tiers.open_tiers(config(host_gib=0.0, nvme=str(tmp_path), nvme_gib=0.05), SPEC)
    assert store is not None
    held = store.stats()[Level.HOST].bytes_max
    assert 0.9 * tiers.STAGING_GIB < held / tiers.GIB <= tiers.STAGING_GIB
    store.close()


def locked(path: Path) -> Any:
    return open_folder(path / "replica-0")


def a_file(path: Path) -> None:
    (path / "replica-0").write_text("in the way")


@pytest.mark.parametrize("spoil", [locked, a_file])
def test_a_directory_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Any
) -> None:
    holder = spoil(tmp_path)
    with caplog.at_level(logging.WARNING):
        store = tiers.open_tiers(config(nvme=str(tmp_path), nvme_gib=0.05), SPEC)
        nothing = tiers.open_tiers(config(host_gib=0.0, nvme=str(tmp_path), nvme_gib=0.05), SPEC)
    assert store is not None and not store.lower
    assert nothing is None
    assert "replica-0 goes on without its disk tier: The disk tier's directory" in caplog.text
    assert ("in use" in caplog.text) == (spoil is locked)
    store.close()
    if holder is not None:
        holder.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_is_read_only_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    store = tiers.open_tiers(config(nvme=str(tmp_path), nvme_gib=0.05), SPEC)
    assert store is not None and not store.lower
    store.close()


def test_a_dead_server_is_a_warning_and_known_before_anybody_needs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        store = tiers.open_tiers(config(redis=DEAD), SPEC)
        assert store is not None
        eventually(lambda: store.stats()[Level.SHARED].state == "broken")
        eventually(lambda: "replica-0 goes on without the shared tier" in caplog.text)
    store.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "redis://[bad", "@/no/such/file"])
def test_a_url_that_is_none_refuses_and_gives_everything_back(tmp_path: Path, url: str) -> None:
    asked = config(nvme=str(tmp_path), nvme_gib=0.05, redis=url)
    with pytest.raises(LaunchError):
        tiers.open_tiers(asked, SPEC)
    open_folder(tmp_path / "replica-0").close()  # not locked any more


def test_memory_that_is_not_there_refuses() -> None:
    with pytest.raises(LaunchError, match="GiB are left"):
        tiers.open_tiers(config(host_gib=1e6), SPEC)
    with pytest.raises(LaunchError, match=r"0\.00 GiB are left"):
        tiers.open_tiers(config(host_gib=0.01), SPEC, reserved_bytes=1 << 60)
    with pytest.raises(LaunchError, match="One block takes"):
        tiers.open_tiers(config(host_gib=1e-7), SPEC)


# ---- telling ------------------------------------------------------------------------------------


def test_figures_of_a_tier_arrive() -> None:
    stats = TierStats(
        blocks=3, bytes=300, bytes_max=1000, state="readonly", hits=9, stored=5, dropped=4,
        evicted=2, failed=1, loaded_bytes=4000, stored_bytes=500, load_s=2.0, store_s=0.25,
        corrupt=Counter({"payload": 2, "key": 1}),
    )  # fmt: skip
    told = tiers.tier_load("host", stats, None, hit_tokens=64, block_bytes=200)
    assert (told.tier, told.state, told.hit_tokens, told.hit_blocks) == ("host", "readonly", 64, 9)
    assert (told.blocks, told.bytes, told.bytes_max) == (3, 300, 1000)
    assert told.logical_bytes == 600
    assert (told.loaded_bytes, told.stored_bytes) == (4000, 500)
    assert (told.load_bytes_per_s, told.store_bytes_per_s) == (2000.0, 2000.0)
    assert (told.dropped, told.evicted, told.failed) == (4, 2, 1)
    assert [(c.cause, c.records) for c in told.corrupt] == [("key", 1), ("payload", 2)]
    check_message(internal_pb2.Load(tiers=[told]))


def test_blocks_of_several_groups_and_ranks_count_by_their_mean() -> None:
    """A tier counts one block for each group and rank."""
    [group] = SPEC.groups
    first = replace(group, block_bytes=1000, ranks=1)
    second = replace(group, id=1, block_bytes=400, ranks=2)
    assert tiers.device_block_bytes(SPEC) == group.block_bytes
    assert tiers.device_block_bytes(replace(SPEC, groups=(first, second))) == 600


def test_what_was_never_measured_is_zero() -> None:
    told = tiers.tier_load("host", TierStats(), None, hit_tokens=0, block_bytes=1)
    assert (told.load_bytes_per_s, told.store_bytes_per_s) == (0.0, 0.0)


def test_drops_of_the_queue_count(tmp_path: Path) -> None:
    store = tiers.open_tiers(config(nvme=str(tmp_path), nvme_gib=0.05), SPEC)
    assert store is not None
    queue = store.lower[Level.DISK]
    queue.close()
    job = StoreJob(BlockName(b"k" * 16, b"p" * 16, b""), lambda name: None, lambda *_: None)
    queue.store([job])
    told = tiers.tier_load("disk", TierStats(dropped=2), queue, hit_tokens=0, block_bytes=1)
    assert told.dropped == 3
    store.close()


def test_capacities_count_blocks_and_only_measured_speed(tmp_path: Path) -> None:
    asked = config(nvme=str(tmp_path), nvme_gib=0.05)
    store = tiers.open_tiers(asked, SPEC)
    assert store is not None
    [group] = SPEC.groups
    host, disk = tiers.capacities(store, asked, SPEC)
    assert (host.tier, disk.tier) == (internal_pb2.TIER_HOST, internal_pb2.TIER_DISK)
    assert host.blocks == store.stats()[Level.HOST].bytes_max // group.block_bytes
    assert (host.bytes_per_s, disk.bytes_per_s) == (0.0, 0.0)
    name = BlockName(b"k" * 16, b"p" * 16, b"\1\0\0\0" * SPEC.block_tokens)
    data = memoryview(bytes(group.block_bytes))
    assert store.host.store([name], [data], 5.0) == [Status.OK]
    into = memoryview(bytearray(group.block_bytes))
    assert store.host.load([name], [into], 5.0) == [Status.OK]
    assert tiers.capacities(store, asked, SPEC)[0].bytes_per_s > 0
    assert tiers.tier_loads(store, SPEC)[0].logical_bytes == group.block_bytes
    assert tiers.capacities(None, asked, SPEC) == [] and tiers.tier_loads(None, SPEC) == []
    store.close()


def test_a_replica_tells_routers_of_its_tiers(
    start_replica: StartReplica, router: FakeRouter
) -> None:
    start_replica(blocks=64, tiers=tiers.open_tiers(config(), SPEC), redis=DEAD, namespace="zoo")
    hello = router.attached()
    assert [c.tier for c in hello.capacities] == [internal_pb2.TIER_DEVICE, internal_pb2.TIER_HOST]
    assert hello.cache_domain == "zoo"
    stream = router.execute()
    prompts = [[i + 1] * 600 for i in range(4)]  # 38 blocks each
    for i, prompt in enumerate(prompts):
        stream.submit(f"r{i}", prompt)
        stream.tokens(f"r{i}")
    stream.submit("again", prompts[0])
    assert stream.finished("again")[-1].usage.cached_tokens > 500

    def told() -> bool:
        [host] = router.beats[-1].load.tiers
        return host.blocks > 0 and host.hit_tokens > 500 and host.hit_tokens % 16 == 0

    eventually(told)
    check_message(router.beats[-1])
    stream.cancel()
