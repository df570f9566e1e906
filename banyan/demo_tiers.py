"""`banyan demo --tiers`: one long conversation is pushed out of small device pools and comes back
from host memory, from disk after its replica was killed, and from Redis on the other replica, each
time beside the time that computing it again takes. It leaves nothing running."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from banyan.cli import output
from banyan.client import Client
from banyan.cluster import launch, stop
from banyan.cluster.spec import ClusterSpec
from banyan.events import ChoiceFinished, Collector, Completion, Delta
from banyan.wire import Options
from seams.bench import Report, Row
from seams.errors import InternalError

Messages = list[dict[str, str]]

POOL_GIB = 0.06  # some 170 blocks of the demo model: one long conversation, not two
WORDS = 1100  # of a conversation's text: about as many tokens
OTHERS = 10
ANSWER_TOKENS = 16
RESTART_S_MAX = 120.0
SINK_S_MAX = 30.0
SETTLE_S = 2.0
TOPICS = (
    "tides", "glass", "bridges", "paper", "salt", "maps", "clocks", "bread", "wool", "stars",
    "rivers", "printing",
)  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One turn of the conversation: where its prefix came from, and what it took."""

    name: str
    replica: str
    answer: Completion
    ttft_s: float
    from_tiers: dict[str, int]  # tier -> tokens


def document(topic: str) -> str:
    """A long text that no other topic's begins with."""
    sentence = (
        f"Note {{}} on {topic}: the reading room keeps shelf {{}} for {topic}, "
        f"and visitor {{}} asked about {topic} again."
    )
    notes = [sentence.format(i, i * 7 % 31, i * 13 % 101) for i in range(WORDS // 21)]
    return f"You answer questions about {topic} in one sentence.\n" + "\n".join(notes)


class TierDemo:
    """The conversation and those that push it out."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.messages: Messages = [{"role": "system", "content": document(TOPICS[0])}]
        self.settle()

    def say(self, name: str, text: str) -> Turn:
        """The conversation's next turn."""
        self.messages.append({"role": "user", "content": text})
        before = self._figures
        answer, ttft_s = self._ask(self.messages)
        self.messages.append({"role": "assistant", "content": answer.text})
        after = self.settle()
        moved = {tier: after[replica, tier] - before.get((replica, tier), 0)
                 for replica, tier in after if replica == answer.replica}  # fmt: skip
        return Turn(name, answer.replica, answer, ttft_s, {k: v for k, v in moved.items() if v > 0})

    def without_cache(self) -> float:
        """The TTFT of the last turn's prompt, computed whole."""
        return self._ask(self.messages[:-1], no_cache=True)[1]

    def push_out(self) -> None:
        """Other conversations fill the device pools of both replicas; then wait until what left
        them has reached the lower tiers."""
        for topic in TOPICS[1 : 1 + OTHERS]:
            text = [{"role": "system", "content": document(topic)},
                    {"role": "user", "content": f"What about {topic}?"}]  # fmt: skip
            self._ask(text)
        wait_for(lambda: self._queued() == 0, SINK_S_MAX, "the tiers still write")
        self.settle()

    def _ask(self, messages: Messages, *, no_cache: bool = False) -> tuple[Completion, float]:
        collector, began, first_s = Collector(1), time.monotonic(), 0.0
        options: Options = {"max_tokens": ANSWER_TOKENS, "no_cache": no_cache}
        for event in self._client.generate(messages, **options):
            collector.add(event)
            if isinstance(event, Delta | ChoiceFinished):
                first_s = first_s or time.monotonic() - began
        return collector.completion(), first_s

    def _hits(self) -> dict[tuple[str, str], int]:
        state = self._client.cluster_state()
        return {(r.replica, t.tier): t.hit_tokens for r in state.replicas for t in r.tiers}

    def settle(self) -> dict[tuple[str, str], int]:
        """Heartbeats bring the figures: while nothing is asked they are final after a few."""
        time.sleep(SETTLE_S)
        self._figures = self._hits()
        return self._figures

    def _queued(self) -> int:
        state = self._client.cluster_state()
        return sum(t.stores_queued for r in state.replicas for t in r.tiers)

    def kill(self, replica: str) -> int:
        """SIGKILL its process; returns the epoch that died."""
        found = {r.replica: r for r in self._client.cluster_state().replicas}[replica]
        port = int(found.address.rpartition(":")[2])
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(c.laddr and c.laddr[1] == port and c.status == psutil.CONN_LISTEN
                       for c in process.net_connections(kind="inet")):  # fmt: skip
                    process.send_signal(signal.SIGKILL)
                    return int(found.epoch)
        raise InternalError(f"The process of {replica} was not found.")

    def wait_restarted(self, replica: str, epoch: int) -> None:
        """Until Ray has started it again and it is attached."""

        def back() -> bool:
            found = {r.replica: r for r in self._client.cluster_state().replicas}.get(replica)
            return found is not None and found.epoch > epoch and found.state == "ready"

        wait_for(back, RESTART_S_MAX, f"{replica} did not come back")
        self.settle()


def wait_for(true: Callable[[], Any], limit_s: float, otherwise: str) -> None:
    """Poll until `true()`; raises InternalError after the limit."""
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            raise InternalError(f"After {limit_s:.0f} s: {otherwise}.")
        time.sleep(0.1)


def run(json_file: str) -> None:
    """The whole demo. Raises BanyanError; then too the cluster and its directory are gone."""
    folder = tempfile.mkdtemp(prefix="banyan-demo-")
    spec = ClusterSpec(
        "demo", f"demo-{os.getpid()}", replicas=2, listen="127.0.0.1:0", device="cpu",
        pool_gib=POOL_GIB, host_gib=1.0, nvme=folder, nvme_gib=2.0, redis="embedded",
    )  # fmt: skip
    try:
        with output.stages(quiet=False) as report:
            record = launch.up(spec, report)
        with Client(record.addresses, timeout_s=300.0) as client:
            turns, computed_s = _converse(TierDemo(client))
    finally:
        stop.down(spec.name, drain=False, everything=True)
        shutil.rmtree(folder, ignore_errors=True)
    _show(turns, computed_s)
    rows = _report(turns, computed_s)
    if json_file:
        rows.write(Path(json_file))
    _verify(turns)


def _converse(demo: TierDemo) -> tuple[list[Turn], list[float]]:
    """Every turn, and what its prompt takes computed whole."""
    turns = [demo.say("first", "How many notes are there? Answer shortly.")]
    computed_s = [demo.without_cache()]

    def next_turn(name: str, text: str) -> None:
        turns.append(demo.say(name, text))
        computed_s.append(demo.without_cache())

    with output.console.status("ten other conversations fill the device pools"):
        demo.push_out()
    next_turn("host", "And which shelf is in the first note?")
    with output.console.status("pushed out again, and its replica is killed and starts anew"):
        demo.push_out()
        holder = turns[-1].replica
        demo.wait_restarted(holder, demo.kill(holder))
    next_turn("disk", "Which visitor is in the second note?")
    with output.console.status("pushed out again, and its replica is killed and stays away"):
        demo.push_out()
        demo.kill(turns[-1].replica)
    next_turn("shared", "Which shelf is in the last note?")
    return turns, computed_s


def _show(turns: list[Turn], computed_s: list[float]) -> None:
    rows = []
    for turn, alone_s in zip(turns, computed_s, strict=True):
        usage = turn.answer.usage
        came = ", ".join(f"{tokens} from {tier}" for tier, tokens in turn.from_tiers.items())
        rows.append([
            turn.name, turn.replica, usage.prompt_tokens, usage.cached_tokens, came or "-",
            f"{turn.ttft_s * 1e3:.0f} ms", f"{alone_s * 1e3:.0f} ms",
        ])  # fmt: skip
    columns = ["turn", "replica", ">prompt\ntokens", ">cached", "tiers", ">TTFT", ">TTFT\ncomputed"]
    output.table("a conversation that was pushed out, beside computing it again", columns, rows)


def _report(turns: list[Turn], computed_s: list[float]) -> Report:
    report = Report()
    for turn, alone_s in zip(turns, computed_s, strict=True):
        report.add(Row(f"demo.ttft_{turn.name}", turn.ttft_s, "s", 1, "computed", alone_s))
    return report


def _verify(turns: list[Turn]) -> None:
    """Raise InternalError if a turn did not come from where it should have."""
    for turn in turns[1:]:
        if not turn.from_tiers.get(turn.name):
            raise InternalError(f"The turn that should come from {turn.name} did not.")
    if turns[2].replica != turns[1].replica or turns[3].replica == turns[2].replica:
        raise InternalError("A turn was served by another replica than it should have been.")
    output.console.print("each came back from where it was left, whole blocks and all")
