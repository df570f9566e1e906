"""`python -m banyan.cluster.fleet start|stop`: the one process that speaks to Ray.

It reads its order as JSON from standard input and reports as JSON lines on standard output, so
the command line never loads Ray, and one process never meets the tokens of two clusters.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray

from worker.service.actor import ReplicaActor

DRAIN_S_MAX = 20.0


def report(**fields: Any) -> None:
    """One line to the launcher."""
    print(json.dumps(fields), flush=True)


def connect(order: dict[str, Any]) -> None:
    """Join the Ray cluster of the order."""
    ray.init(
        address=order["address"],
        namespace=order["namespace"],
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=False,
    )


def sentence(error: BaseException) -> str:
    """What went wrong in a replica's start, without Ray's traceback around it."""
    text = str(error).strip()
    for line in reversed(text.splitlines()):
        head, _, rest = line.strip().partition(": ")
        if head.startswith("seams.errors.") and rest:
            return rest
    return (text.splitlines() or [type(error).__name__])[-1].strip()


def start(order: dict[str, Any]) -> int:
    """Create every replica's actor and wait until each has built its model and listens."""
    connect(order)
    make = ray.remote(ReplicaActor)
    waiting = {}
    for replica in order["replicas"]:
        actor = make.options(
            name=replica["config"]["replica"],
            lifetime="detached",
            namespace=order["namespace"],
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=8,
            num_cpus=replica["cpus"],
            num_gpus=replica["gpus"],
            runtime_env={"env_vars": replica["env"]},
        ).remote(replica["config"])
        waiting[actor.address.remote()] = replica["config"]["replica"]
    report(event="placed", replicas=list(waiting.values()))
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1)
        name = waiting.pop(done[0])
        try:
            report(event="ready", replica=name, address=ray.get(done[0]))
        except Exception as error:
            report(event="failed", replica=name, message=sentence(error))
            return 1
    return 0


def stop(order: dict[str, Any]) -> int:
    """Drain the named replicas if asked to, then end their actors for good."""
    connect(order)
    actors = {}
    for name in order["replicas"]:
        try:
            actors[name] = ray.get_actor(name, namespace=order["namespace"])
        except ValueError:
            continue  # gone already
    if order["drain"]:
        ray.wait(
            [actor.drain.remote() for actor in actors.values()] or [ray.put(None)],
            num_returns=max(1, len(actors)),
            timeout=DRAIN_S_MAX,
        )
    for name, actor in actors.items():
        ray.kill(actor, no_restart=True)
        report(event="stopped", replica=name)
    return 0


if __name__ == "__main__":
    sys.exit({"start": start, "stop": stop}[sys.argv[1]](json.load(sys.stdin)))
