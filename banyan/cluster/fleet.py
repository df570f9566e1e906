"""`python -m banyan.cluster.fleet start|stop`: the one process that speaks to Ray.

It reads its order as JSON from standard input and reports as JSON lines on standard output, so
the command line never loads Ray, and one process never meets the tokens of two clusters.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import ray

from worker.service.actor import ReplicaActor

DRAIN_S_MAX = 20.0
STOP_S_MAX = 12.0  # a replica's tiers take up to 5 s for what only host memory has, then close
POLL_S = 0.2


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


def place(order: dict[str, Any]) -> dict[str, Any]:
    """Create every replica's actor; returns them by name."""
    make = ray.remote(ReplicaActor)
    return {
        replica["config"]["replica"]: make.options(
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
        for replica in order["replicas"]
    }


def start(order: dict[str, Any]) -> int:
    """Place all replicas and wait until each has built its model and is attached to its routers.

    Ends with 1 at the first that cannot be built or that a router refuses: it would stay so.
    """
    connect(order)
    actors = place(order)
    routers = {r["config"]["replica"]: len(r["config"]["routers"]) for r in order["replicas"]}
    report(event="placed", replicas=list(actors))
    building = {actor.address.remote(): name for name, actor in actors.items()}
    attaching: set[str] = set()
    while building or attaching:
        done = ray.wait(list(building), num_returns=1, timeout=POLL_S)[0] if building else []
        for reference in done:
            name = building.pop(reference)
            try:
                report(event="ready", replica=name, address=ray.get(reference))
            except Exception as error:
                report(event="failed", replica=name, message=sentence(error))
                return 1
            attaching.add(name)
        for name in sorted(attaching):
            attached, refusal = standing(actors[name])
            if refusal:
                report(event="failed", replica=name, message=f"{name} is refused: {refusal}")
                return 1
            if attached >= routers[name]:
                attaching.remove(name)
        if not building:
            time.sleep(POLL_S)
    return 0


def standing(actor: Any) -> tuple[int, str]:
    """How many routers have taken a replica, and why one refuses it ("": none does)."""
    try:
        said = ray.get(actor.describe.remote())
    except ray.exceptions.RayError:  # it died: Ray starts it anew, and the routers will see that
        return 0, ""
    return said["attached"], said["refusal"]


def end(actors: list[Any], drain_s: float) -> None:
    """Let what runs end within `drain_s`, then let the replicas stop by themselves, which writes
    down what their tiers still hold in memory. An actor that does not answer is not waited for
    longer."""
    for call, limit_s in (("drain", drain_s), ("stop", STOP_S_MAX)):
        asked = [getattr(actor, call).remote() for actor in actors]
        ray.wait(asked, num_returns=len(asked), timeout=limit_s)


def stop(order: dict[str, Any]) -> int:
    """Drain the named replicas if asked to, then end their actors for good."""
    connect(order)
    actors = {}
    for name in order["replicas"]:
        try:
            actors[name] = ray.get_actor(name, namespace=order["namespace"])
        except ValueError:
            continue  # gone already
    if order["drain"] and actors:
        end(list(actors.values()), DRAIN_S_MAX)
    for name, actor in actors.items():
        ray.kill(actor, no_restart=True)
        report(event="stopped", replica=name)
    return 0


if __name__ == "__main__":
    sys.exit({"start": start, "stop": stop}[sys.argv[1]](json.load(sys.stdin)))
