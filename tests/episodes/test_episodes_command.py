"""`banyan episodes` with a real model: what it writes is found by who has the same conversation,
tenant, options and representation, and by nobody else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from typer.testing import CliRunner

from banyan.cli.app import app
from banyan.cluster import state
from banyan.conversation import read_conversation
from kvstore.keys import ChainSpec, chain, root, tenant_salt
from kvstore.objects import Objects
from kvstore.tiers.embedded import EmbeddedValkey
from kvstore.tiers.nvme import open_folder
from router.text.model import TextModel
from seams.errors import BanyanError
from seams.proof import read_secret
from seams.textfiles import read_text_files
from worker.config import ReplicaConfig
from worker.engine.retention.options import Options
from worker.episodes.base import EpisodeIndex, EpisodeOptions
from worker.episodes.keeping import EpisodeShelf
from worker.episodes.outline import nearest
from worker.models.base import Model
from worker.models.load import load_model
from worker.service.tiers import open_tiers

WITHIN_S = 20.0
LINES = [
    "Anna: Clara keeps nine hives of bees in Norwich and sells their honey.",
    "Ben: Bees and honey in Norwich, nine hives of them!",
    "Anna: The boat is called Grey Heron and its mast is of spruce.",
    "Ben: The mast of the boat is of spruce, I see.",
] * 2
ASKED = ("--episodes", "2", "--budget", "64", "--block", "144", "--window", "2", "--medoids", "1")


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Model:
    """A replica's: as many pages as an episode needs."""
    config = ReplicaConfig("r", str(demo_model), "m", (), "", compute="torch")
    loaded = load_model(config)
    loaded.allocate((8,))
    return loaded


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))
    path = tmp_path / "talk.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.fixture
def server() -> Iterator[EmbeddedValkey]:
    made = EmbeddedValkey(1 << 28)
    yield made
    made.close()


def run(*arguments: str) -> dict[str, Any]:
    """What the command prints as JSON. Raises the BanyanError that it ends with."""
    found = CliRunner().invoke(app, ["episodes", *arguments, "--json"], catch_exceptions=True)
    if found.exception is not None:
        raise found.exception
    printed: dict[str, Any] = json.loads(found.stdout)
    return printed


def look(
    model: Model, config: ReplicaConfig, said: Path, policy: str, tenant: str = "default"
) -> tuple[EpisodeIndex | None, list[np.ndarray | None]]:
    """The index, and the positions of each episode, as somebody else finds them."""
    text = TextModel(read_text_files(Path(config.model)))
    history = read_conversation(said, text, 16).token_ids
    salt = tenant_salt(read_secret(state.folder("default") / "secret"), tenant)
    last = chain(ChainSpec(root(model.spec.fingerprint, "", 16), 16, salt), history)[-1]
    store = open_tiers(config, model.spec)
    assert store is not None
    try:
        options = EpisodeOptions.of(Options(policy), 16)
        shelf = EpisodeShelf(Objects(store, model.spec.groups, 16), model, last, options)
        index = shelf.index(WITHIN_S)
        kept = [shelf.load_episode(number, range(8), WITHIN_S) for number in range(2)]
        if index is not None:
            bees = text.encode_text("Where does Clara keep her bees, and who buys honey?")
            boat = text.encode_text("Of what is the mast of the boat?")
            assert {nearest(index, bees), nearest(index, boat)} == {0, 1}
        return index, [None if one is None else one.positions for one in kept]
    finally:
        store.close()


def test_a_shared_tier_has_it_for_all_replicas(
    said: Path, demo_model: Path, model: Model, server: EmbeddedValkey, tmp_path: Path
) -> None:
    where = tmp_path / "url"
    where.write_text(server.url)
    where.chmod(0o600)
    days = ("--ttl-s", str(9 * 24 * 3600))
    shared = ("--redis", f"@{where}", *days)
    built = run(str(demo_model), "--conversation", str(said), *shared, *ASKED)
    with redis.Redis.from_url(server.url) as client:
        left_s = [client.ttl(key) for key in client.scan_iter()]
    assert len(left_s) > 10 and min(left_s) > 8 * 24 * 3600
    assert built["kept_tokens"] == 64 and built["peak_tokens"] <= 64 + 144
    assert built["history_tokens"] % 16 == 0 and len(built["segments"]) == 2
    block_bytes = model.spec.groups[0].block_bytes
    assert built["episode_bytes"] == 4 * block_bytes
    config = ReplicaConfig("r", str(demo_model), "m", (), "", redis=server.url)
    index, positions = look(model, config, said, built["policy"])
    assert index is not None and index.history_tokens == built["history_tokens"]
    assert index.segments.tolist() == built["segments"]
    for kept in positions:
        assert kept is not None and kept.shape == (90, 64)
        assert (np.sort(kept, axis=1)[:, :16] == np.arange(16)).all()  # sinks
    others = [
        (config, "default", built["policy"] + "1"),  # another seed
        (config, "somebody", built["policy"]),
        (replace(config, cold_codec="fp8"), "default", built["policy"]),
    ]
    for other, tenant, policy in others:
        assert look(model, other, said, policy, tenant) == (None, [None, None])


@pytest.mark.soak
def test_a_disk_tier_has_it_for_its_replica(
    said: Path, demo_model: Path, model: Model, tmp_path: Path
) -> None:
    disks = tmp_path / "disks"
    options = ("--nvme", str(disks), "--nvme-gib", "0.3", "--replica", "replica-1")
    command = (str(demo_model), "--conversation", str(said), *options, *ASKED)
    built = run(*command)
    shown = CliRunner().invoke(app, ["episodes", *command]).stdout  # a second time changes nothing
    assert f"retention {built['policy']}" in " ".join(shown.split()) and "tokens kept" in shown
    config = ReplicaConfig("replica-1", str(demo_model), "m", (), "", nvme=str(disks), nvme_gib=0.3)
    index, positions = look(model, config, said, built["policy"])
    assert index is not None and all(one is not None for one in positions)
    held = open_folder(disks / "replica-1")  # as a replica that runs
    try:
        with pytest.raises(BanyanError, match="must not be in use"):
            run(*command)
    finally:
        held.close()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "written to one tier at a time"),
        (("--nvme", "x", "--nvme-gib", "1", "--redis", "redis://h"), "one tier at a time"),
        (("--nvme", "x"), "one of nvme and nvme_gib alone"),
        (("--replica", "a"), "needs --nvme"),
        (("--redis", "redis://h", "--ttl-s", "0"), "redis_ttl_s of at least 1"),
        (("--redis", "redis://h", "--ttl-s", str(10**17)), "for ten years at most"),
        (("--redis", "redis://u:secret@h"), "A password in --redis"),
        (("--redis", "redis://h", "--sinks", "64", *ASKED), "fewer than its budget"),
        (
            ("--redis", "redis://h", "--budget", "64", "--block", "32"),
            "no room for a patched prompt",
        ),
        (("--redis", "redis://h", "--budget", "4096"), "keeps them all"),
        (("--redis", "redis://h", "--episodes", "0"), "episodes is a whole number"),
        (("--redis", "redis://h", "--kv-codec", "oscar"), "oscar keeps the newest tokens in a win"),
        (
            ("--redis", "redis://h", "--kv-codec", "oscar:sinks=16,window=32", *ASKED),
            "keeps the newest tokens in a window, and an episode keeps tokens of the whole",
        ),
        (("--redis", "redis://h", "--kv-codec", "oscar:window=0"), "The KV codec must be model"),
        (("--redis", "redis://h", "--cold-codec", "zip"), "The cold codec must be none"),
        (("--redis", "redis://h", "--device", "tpu", *ASKED), "The device must be auto"),
        (("--redis", "redis://h", "--dtype", "int3", *ASKED), "The dtype must be auto"),
        (("--nvme", "x", "--nvme-gib", "0.003", *ASKED), "allows 0.00 GiB"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    said: Path, demo_model: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(BanyanError, match=sentence):
        run(str(demo_model), "--conversation", str(said), *arguments)


def test_what_is_too_long_is_not_clustered_first(
    said: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outlined(*_: object) -> None:
        raise AssertionError("which may take minutes")

    monkeypatch.setattr("worker.episodes.outline.outline", outlined)
    said.write_text("\n".join(LINES * 80) + "\n")
    with pytest.raises(BanyanError, match="does not fit the model's context of 8192"):
        run(str(demo_model), "--conversation", str(said), "--redis", "redis://h", *ASKED)
