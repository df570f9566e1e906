"""One real cluster for all end-to-end tests: the command line starts it and has to end it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_cluster import (
    CLUSTER,
    Banyan,
    LiveCluster,
    abandoned,
    logs,
    ray_folders,
    run_banyan,
    strays,
)

from banyan.cluster import state


@pytest.fixture(autouse=True)
def no_ray_folder_stays() -> Iterator[None]:
    """Ray keeps its files outside the home: what a test's clusters made there is gone too."""
    before = ray_folders()
    yield
    assert abandoned(ray_folders() - before) == set()


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home for commands that start clusters of their own; nothing may be left of them."""
    yield tmp_path
    assert strays(tmp_path) == []


@pytest.fixture
def banyan(home: Path) -> Banyan:
    """The command line in that home."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = run_banyan(home, *arguments)
        return done

    return run


@pytest.fixture(scope="session")
def cluster(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Two replicas in fp32, two routers, the real model."""
    home = tmp_path_factory.mktemp("home")
    options = ["--model", str(demo_model), "--replicas", "2", "--routers", "2", "--dtype", "fp32"]
    options += ["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--device", "cpu"]
    options += ["--http", "127.0.0.1:0"]
    done = run_banyan(home, "up", *options, "--json")
    try:
        assert done.returncode == 0, done.stdout + done.stderr + logs(home)
        print(f"up in {json.loads(done.stdout)['took_s']:.1f} s")
        os.environ["BANYAN_HOME"], before = str(home), os.environ.get("BANYAN_HOME")
        record = state.load(CLUSTER)
        os.environ.pop("BANYAN_HOME") if before is None else os.environ.update(BANYAN_HOME=before)
        assert record is not None
        yield LiveCluster(home, record)
    finally:
        down = run_banyan(home, "down", "--json")
    assert json.loads(down.stdout) == {"name": CLUSTER, "stopped": True}, down.stderr
    assert strays(home) == []
    assert not list(home.rglob("cluster.json"))
    assert not Path(record.ray.temp_dir).exists() if record.ray else True
    assert json.loads(run_banyan(home, "down", "--json").stdout)["stopped"] is False
