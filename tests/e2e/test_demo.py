"""`banyan demo`, short: it exits 0, its figures add up and nothing of it stays."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from e2e_cluster import Banyan

from banyan.models import DEMO_NAME

pytestmark = pytest.mark.timeout(280)


def test_demo(home: Path, banyan: Banyan, demo_model: Path) -> None:
    (home / "models").mkdir()
    (home / "models" / DEMO_NAME).symlink_to(demo_model)
    figures = home / "figures.json"
    done = banyan("demo", "--users", "2", "--max-tokens", "6", "--json", str(figures))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything shareable cached: 2 of 2" in done.stdout
    assert re.search(
        r"^why Bao went to replica-[01]: \S.* \(replica-[01]: ", done.stdout, re.MULTILINE
    )
    rows = {row["name"]: row for row in json.loads(figures.read_text())["rows"]}
    computed = rows["demo.computed_tokens"]
    assert computed["samples"] == 4 and computed["ratio"] < 0.5
    assert rows["demo.same_answers"]["value"] == 4
    assert rows["demo.start_to_first_token"]["value"] > 0
    assert list((home / "clusters").iterdir()) == []


def test_demo_of_the_tiers(home: Path, banyan: Banyan, demo_model: Path) -> None:
    """It fails by itself if a turn did not come from where it should, or from the wrong replica;
    how much of it did depends on what was faster to compute."""
    (home / "models").mkdir()
    (home / "models" / DEMO_NAME).symlink_to(demo_model)
    done = banyan("demo", "--tiers")
    assert done.returncode == 0, done.stdout + done.stderr
    for tier in ("host", "disk", "shared"):
        assert re.search(rf"{tier}\s+replica-\d.* from {tier}", done.stdout), done.stdout
    assert list((home / "clusters").iterdir()) == []


def test_too_many_users(banyan: Banyan) -> None:
    done = banyan("demo", "--users", "99")
    assert done.returncode == 1
    assert done.stderr == "error: --users must be from 1 to 8.\n"
