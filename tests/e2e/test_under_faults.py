"""One process is killed while streams run: no stream is lost, no token doubled or missing."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import pytest
from e2e_text import SYSTEM, tie_or_equal

from banyan import Client
from banyan.cluster import processes
from banyan.events import Collector, Completion, Delta, Started

pytestmark = pytest.mark.timeout(280)
STREAMS = 6
TOKENS = 200  # more than a second of streaming: nothing ends before the kill


def ask(client: Client, index: int, begun: SimpleQueue[str] | None = None) -> Completion:
    """One greedy answer with the logprobs that tell a tie; at token 4 `begun` gets its replica."""
    prompt = f"{SYSTEM}\n\nStory number {index}: once upon a time"
    collector, replica = Collector(1), ""
    for event in client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, logprobs=2):
        collector.add(event)
        if isinstance(event, Started):
            replica = event.replica
        if isinstance(event, Delta) and event.position == 4 and begun is not None:
            begun.put(replica)
    return collector.completion()


def states(client: Client) -> dict[str, tuple[str, int]]:
    return {r.replica: (r.state, r.epoch) for r in client.cluster_state().replicas}


def wait_for(true: Any, limit_s: float) -> float:
    """Seconds until `true()`."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < limit_s
        time.sleep(0.02)
    return time.monotonic() - began


def test_killed_replica(cluster) -> None:
    with Client(cluster.record.addresses[0], timeout_s=200) as client:
        with ThreadPoolExecutor(STREAMS) as pool:
            undisturbed = list(pool.map(partial(ask, client), range(STREAMS)))
        before = {r.replica: r for r in client.cluster_state().replicas}
        begun: SimpleQueue[str] = SimpleQueue()
        with ThreadPoolExecutor(STREAMS) as pool:
            answers = [pool.submit(ask, client, i, begun) for i in range(STREAMS)]
            holders = Counter(begun.get(timeout=120) for _ in range(STREAMS))
            [(victim, _)] = holders.most_common(1)
            cluster.replica_process(before[victim].address).send_signal(signal.SIGKILL)
            old = ("ready", before[victim].epoch)
            dropped_s = wait_for(lambda: states(client).get(victim) != old, 5)
            finished = [answer.result() for answer in answers]
        for whole, disturbed in zip(undisturbed, finished, strict=True):
            assert len(disturbed.token_ids) == TOKENS
            tie_or_equal(whole, disturbed)
        moved = sum(answer.usage.moves for answer in finished)
        assert moved >= 1
        again_s = wait_for(lambda: states(client).get(victim, ("", 0))[0] == "ready", 120)
        assert states(client)[victim][1] > before[victim].epoch
        with Client(cluster.record.addresses[1], timeout_s=60) as other:
            wait_for(lambda: states(other).get(victim) == states(client)[victim], 30)
        print(f"dropped after {dropped_s:.2f} s, {moved} moved, back after {again_s:.1f} s more")


def states_of(client: Client) -> dict[str, Any]:
    return {r.replica: r for r in client.cluster_state().replicas}


def test_killed_replica_under_a_direct_stream(cluster) -> None:
    with Client(cluster.record.addresses, timeout_s=200) as client:
        prompt = f"{SYSTEM}\n\nA direct story: once upon a time"
        options: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 2}
        whole = client.complete(prompt, **options)
        collector, killed = Collector(1), ""
        with client.generate(prompt, direct=True, **options) as stream:
            for event in stream:
                collector.add(event)
                if isinstance(event, Delta) and event.position >= 5 and not killed:
                    assert stream.progress.started is not None
                    killed = stream.progress.started.replica
                    address = states_of(client)[killed].address
                    cluster.replica_process(address).send_signal(signal.SIGKILL)
        answer = collector.completion()
        assert len(answer.token_ids) == TOKENS and answer.resumes == 1
        assert answer.replica != killed
        tie_or_equal(whole, answer)
        wait_for(lambda: states(client).get(killed, ("", 0))[0] == "ready", 120)


def test_killed_router(cluster) -> None:
    """This router is not started again: only the next test comes after it."""
    addresses = cluster.record.addresses
    with Client(addresses, timeout_s=200) as client:
        undisturbed = [ask(client, 100 + i) for i in range(3)]
    with Client(addresses, timeout_s=200) as client, ThreadPoolExecutor(3) as pool:
        begun: SimpleQueue[str] = SimpleQueue()
        answers = [pool.submit(ask, client, 100 + i, begun) for i in range(3)]
        for _ in range(3):
            begun.get(timeout=120)
        os.kill(cluster.record.routers[0].process.pid, signal.SIGKILL)
        finished = [answer.result() for answer in answers]
        for whole, disturbed in zip(undisturbed, finished, strict=True):
            tie_or_equal(whole, disturbed)
        assert [answer.resumes for answer in finished] == [1, 1, 1]
        assert client.cluster_state().router == "router-1"
    shown = cluster.banyan("status")
    assert shown.returncode == 0 and "gone" in shown.stdout


def test_killed_ray_head(cluster) -> None:
    """The last test of the session. Ray restarts nothing any more, and nothing needs it to."""
    ray = cluster.record.ray
    [gcs] = [p for p in processes.members(ray.head) if p.name() == "gcs_server"]
    with Client(cluster.record.addresses[1], timeout_s=200) as client:
        epochs = states(client)
        assert len(epochs) == 2
        gcs.send_signal(signal.SIGKILL)
        until = time.monotonic() + 20
        index = 200
        while time.monotonic() < until:
            answers = [client.generate([index + i, 5, 7], max_tokens=8) for i in range(4)]
            with ThreadPoolExecutor(4) as pool:
                done = list(pool.map(lambda answer: answer.completion(), answers))
            assert all(answer.usage.completion_tokens for answer in done)
            index += 4
        assert states(client) == epochs
