"""Everything at once, on the real model: tenants' salts, a shared prefix, four-bit records, pruned
generations, Valkey and a second replica that goes on with a conversation which the first began."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e_cluster import Banyan, logs
from e2e_text import SYSTEM

from banyan import Client
from banyan.calibrate import calibrate
from banyan.cluster import processes
from banyan.events import Completion

pytestmark = pytest.mark.timeout(280)

POLICY = "triattention:budget=16,interval=16,window=8,resume"
COLD = "turboquant4"
TURN, NEXT = 50, 12  # tokens of the answers
BLOCK = 16
NEAR = 0.05  # nats between the two best, under which another arithmetic may choose the other
QUESTIONS = (
    "\nQ: When are you open on Monday?\nA:",
    "\nQ: How many books may I borrow?\nA:",
    "\nQ: And on Sunday?\nA:",
)


def until(check: Callable[[], Any], within_s: float = 60.0) -> Any:
    end = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.1)
    return found


def ask(client: Client, ids: Sequence[int], count: int) -> Completion:
    return client.complete(
        list(ids), max_tokens=count, ignore_eos=True, temperature=0.0, seed=1, logprobs=2
    )


def all_sunk(client: Client) -> bool:
    """Whether the shared tier has got something, and nothing more is on its way."""
    tiers = [t for r in client.cluster_state().replicas for t in r.tiers if t.tier == "shared"]
    return any(t.stored_bytes for t in tiers) and not any(t.stores_queued for t in tiers)


def metric(address: str, name: str) -> float:
    """Over all replicas."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    lines = re.findall(rf"^\S*{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return sum(map(float, lines))


def kill(record: dict[str, Any], address: str) -> None:
    """The process that listens there."""
    port = int(address.rpartition(":")[2])
    for member in processes.members(processes.Process(**record["ray"]["head"])):
        if any(c.status == "LISTEN" and c.laddr.port == port for c in member.net_connections()):
            member.kill()
            return
    raise AssertionError("no process listens there")


class Alone:
    """The same model, policy and codec in this process: one engine and no other request."""

    def __init__(self, model: Path, calibration: Path) -> None:
        from worker.config import ReplicaConfig
        from worker.service.assemble import load_parts

        config = ReplicaConfig(
            replica="alone", model=str(model), served_name="alone", routers=(), secret_file="",
            device="cpu", dtype="fp32", compute="torch", pool_gib=0.2, host_gib=0.2,
            cold_codec=COLD, retention=POLICY, calibration=str(calibration),
        )  # fmt: skip
        self.engine = load_parts(config).engine
        self.tokens: list[int] = []
        self.gaps: list[float] = []  # between the two best, per token
        self.cached = 0
        self.ended = threading.Event()
        self.engine.start(self._take)

    def _take(self, output: Any) -> None:
        for emission in output.emissions:
            self.tokens += emission.token_ids
            for told in emission.logprobs:
                (_, best), (_, second) = told.top[:2]
                self.gaps.append(best - second)
            if emission.last:
                self.cached = emission.usage.cached_tokens
                self.ended.set()

    def run(self, ids: Sequence[int], count: int, given: int = 0) -> None:
        """Generate `count` tokens, of which the last ones of `ids` are the first."""
        from worker.engine.messages import EngineRequest
        from worker.engine.sampling import SamplingParams

        self.tokens, self.gaps = [], []
        self.ended.clear()
        sampling = SamplingParams(seed=1, max_tokens=count, ignore_eos=True, logprobs=2)
        self.engine.submit(
            EngineRequest(f"r{time.monotonic_ns()}", tuple(ids), len(ids) - given, sampling)
        )
        assert self.ended.wait(100)

    def agrees(self, answer: Completion, what: str) -> None:
        """The same tokens, or another one first where the two best are near."""
        ours = answer.token_ids
        at = next((i for i, t in enumerate(self.tokens) if ours[i] != t), len(self.tokens))
        print(f"{what}: the same for {at} of {len(self.tokens)} tokens")
        assert len(ours) == len(self.tokens)
        assert at == len(ours) or self.gaps[at] < NEAR, f"{what}: token {at} is another"


def test_a_conversation_goes_on_at_a_second_replica(
    home: Path, banyan: Banyan, demo_model: Path, tmp_path: Path
) -> None:
    from router.text.model import TextModel
    from seams.textfiles import read_text_files

    calibration, keys = tmp_path / "calibration", tmp_path / "keys.json"
    text = Path(__file__).parents[2] / "docs" / "architecture.md"
    calibrate(str(demo_model), text, calibration, 384, "cpu")
    keys.write_text(json.dumps({"key-of-alice": "alice", "key-of-bob": "bob"}))
    keys.chmod(0o600)
    encode = TextModel(read_text_files(demo_model)).encode_text
    first_prompt, other_prompt = (encode(SYSTEM + q) for q in QUESTIONS[:2])
    done = banyan(
        "up", "--model", str(demo_model), "--replicas", "2", "--device", "cpu", "--dtype", "fp32",
        "--compute", "torch", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0",
        "--pool-gib", "0.2", "--host-gib", "0.2", "--redis", "embedded", "--cold-codec", COLD,
        "--retention", POLICY, "--calibration", str(calibration), "--api-keys", str(keys), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + logs(home)
    record = json.loads(done.stdout)
    print(f"up in {record['took_s']:.1f} s")
    router = record["routers"][0]
    try:
        with (
            Client(router["listen"], api_key="key-of-alice", timeout_s=100) as alice,
            Client(router["listen"], api_key="key-of-bob", timeout_s=100) as bob,
        ):
            first = ask(alice, first_prompt, TURN)
            other = ask(alice, other_prompt, 2)  # the system message is hers already
            conversation = [*first_prompt, *first.token_ids, *encode(QUESTIONS[2])]
            until(lambda: metric(router["metrics"], "retention_freed_blocks_total") >= 2)
            until(lambda: all_sunk(alice))
            held = {r.replica: r.address for r in alice.cluster_state().replicas}
            kill(record, held[first.replica])
            second = ask(alice, conversation, NEXT)
            theirs = ask(bob, conversation, 2)
            until(lambda: metric(router["metrics"], "retention_objects_resumed_total") >= 1)
    finally:
        down = banyan("down", "--json")
    assert json.loads(down.stdout)["stopped"] is True, down.stderr
    left = len(first_prompt) + TURN - 1  # what the first turn computed
    print(f"{first.replica} then {second.replica}: {second.usage}")
    assert other.usage.cached_tokens >= len(first_prompt) // 2 // BLOCK * BLOCK
    assert second.replica != first.replica
    prefix = len(first_prompt) // BLOCK * BLOCK  # computed again, where that replica has none
    assert left - prefix <= second.usage.cached_tokens <= left
    assert theirs.usage.cached_tokens == 0, "another tenant's prefix or state"
    alone = Alone(demo_model, calibration)
    alone.run(first_prompt, TURN)
    alone.agrees(first, "the first turn")
    alone.run([*first_prompt, *first.token_ids[:-1]], TURN, given=TURN - 1)  # that very answer
    alone.run(conversation, NEXT)
    assert alone.cached == left
    alone.agrees(second, "the next turn")
    alone.engine.stop()
