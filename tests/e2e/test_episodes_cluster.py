"""Episodes written by the command line, and a cluster whose requests go on from them."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from e2e_cluster import Banyan, logs
from planted_topics import QUESTIONS, planted

from banyan import Client

pytestmark = [pytest.mark.timeout(290), pytest.mark.soak]

# Questions that this small model answers from the whole conversation, but for a slip.
ASKED = [QUESTIONS["boat"][0], QUESTIONS["bakery"][0], QUESTIONS["bakery"][2]]
OPTIONS = ("--episodes", "4", "--budget", "256", "--block", "320", "--medoids", "2")


def test_questions_go_on_from_episodes_in_the_shared_tier(
    home: Path, banyan: Banyan, demo_model: Path, tmp_path: Path
) -> None:
    talk = tmp_path / "talk.txt"
    talk.write_text(planted())
    done = banyan(
        "up", "--model", str(demo_model), "--device", "cpu", "--compute", "torch",
        "--redis", "embedded", "--retention", "requests", "--listen", "127.0.0.1:0",
        "--metrics", "127.0.0.1:0", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + logs(home)
    (router,) = json.loads(done.stdout)["routers"]
    try:
        # The shared tier that the running cluster uses is the default.
        built = banyan("episodes", str(demo_model), "--conversation", str(talk), *OPTIONS, "--json")
        assert built.returncode == 0, built.stderr + logs(home)
        made = json.loads(built.stdout)
        assert made["peak_tokens"] <= 256 + 320 and made["kept_tokens"] == 256
        with Client(router["listen"], timeout_s=120) as client:
            right = 0
            for question, answer in ASKED:
                found = client.complete(
                    planted() + question, max_tokens=6, temperature=0.0, retention=made["policy"]
                )
                print(repr(question), "->", repr(found.text), found.usage)
                assert found.usage.cached_tokens == made["history_tokens"]
                right += found.text.startswith(answer)
            assert right >= 2
            whole = client.complete(planted() + ASKED[0][0], max_tokens=6, temperature=0.0)
            assert whole.usage.cached_tokens == 0  # no prompt before it left anything
        with urllib.request.urlopen(f"http://{router['metrics']}/metrics", timeout=10) as answer:
            said = answer.read().decode()
        (line,) = [part for part in said.splitlines() if "objects_resumed_total{" in part]
        assert float(line.rpartition(" ")[2]) == 3
    finally:
        down = banyan("down", "--json")
    assert json.loads(down.stdout)["stopped"] is True, down.stderr
