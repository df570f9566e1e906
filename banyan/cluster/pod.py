"""`python -m banyan.cluster.pod`: one pod of the chart. Joins the Ray cluster with its own node and
keeps one replica, pinned to that node, until SIGTERM; then it drains. Ray restarts the replica.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from banyan.cluster.fleet import STOP_S_MAX, sentence
from banyan.cluster.ray_head import OBJECT_STORE_BYTES, SETTINGS
from banyan.models import resolve_model, served_name
from seams.errors import BanyanError, LaunchError
from worker.config import ReplicaConfig

JOIN_S_MAX = 300.0
NODE_S_MAX = 20.0
LEAVE_S_MAX = 5.0 + STOP_S_MAX + NODE_S_MAX  # all that comes after the drain's own grace
NAMESPACE = "banyan"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m banyan.cluster.pod", description=__doc__)
    for name in ("ray-address", "node-ip", "replica", "model", "routers", "secret-file", "listen"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--node", default="")
    parser.add_argument("--served-name", default="")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compute", default="auto")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context-tokens", type=int, default=0)
    parser.add_argument("--speculate", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--pool-gib", type=float)
    parser.add_argument("--grace-s", type=float, default=60.0)
    parser.add_argument("--adapter", action="append", default=[], help="NAME=FOLDER; repeatable")
    parser.add_argument("--host-gib", type=float, default=0.0)
    parser.add_argument("--nvme", default="", help="a directory")
    parser.add_argument("--nvme-gib", type=float, default=0.0)
    parser.add_argument("--redis", default="", help="a URL, or @FILE with one in it")
    parser.add_argument("--namespace", default="default", help="of this cluster in that server")
    parser.add_argument("--cold-codec", default="none")
    parser.add_argument("--kv-codec", default="model")
    parser.add_argument("--retention", default="")
    parser.add_argument("--calibration", default="", help="a file of `banyan calibrate`")
    return parser.parse_args(arguments)


def replica_config(options: argparse.Namespace, model: str) -> ReplicaConfig:
    """What the replica is told; `model` is the resolved folder."""
    return ReplicaConfig(
        replica=options.replica,
        model=model,
        served_name=options.served_name or served_name(options.model),
        routers=tuple(options.routers.split(",")),
        secret_file=options.secret_file,
        listen=options.listen,
        device=options.device if options.gpus else "cpu",
        dtype=options.dtype,
        compute=options.compute,
        batch_invariant=options.batch_invariant,
        threads=options.threads,
        pool_gib=options.pool_gib,
        context_tokens=options.context_tokens,
        speculate=options.speculate,
        adapters=tuple(options.adapter),
        host_gib=options.host_gib,
        nvme=options.nvme,
        nvme_gib=options.nvme_gib,
        redis=options.redis,
        namespace=options.namespace,
        cold_codec=options.cold_codec,
        kv_codec=options.kv_codec,
        retention=options.retention,
        calibration=options.calibration,
    )


def start_node(options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """This pod's Ray node, as a child. Retries while the head is not there; raises LaunchError."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--address={options.ray_address}", f"--node-ip-address={options.node_ip}"]
    command += [f"--num-cpus={max(1, options.threads)}", f"--num-gpus={options.gpus}"]
    command += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats"]
    deadline = time.monotonic() + JOIN_S_MAX
    while time.monotonic() < deadline:
        node = subprocess.Popen(command, env={**SETTINGS, **os.environ}, start_new_session=True)
        try:
            node.wait(timeout=8.0)
        except subprocess.TimeoutExpired:
            return node
        time.sleep(1.0)
    raise LaunchError(f"The Ray cluster was not to be joined within {JOIN_S_MAX:.0f} s.")


def place(options: argparse.Namespace, config: ReplicaConfig) -> Any:
    """Create the replica's actor on this node, in place of one that an earlier pod left.

    Returns the actor once it listens. Raises LaunchError.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from worker.service.actor import ReplicaActor

    ray.init(
        address=options.ray_address, namespace=NAMESPACE, log_to_driver=False,
        _node_ip_address=options.node_ip, configure_logging=False,
    )  # fmt: skip
    with suppress(ValueError):  # nothing was left
        ray.kill(ray.get_actor(config.replica, namespace=NAMESPACE), no_restart=True)
    here = ray.get_runtime_context().get_node_id()
    actor = (
        ray.remote(ReplicaActor)
        .options(
            name=config.replica, lifetime="detached", namespace=NAMESPACE, max_restarts=-1,
            max_task_retries=0, max_concurrency=8, num_cpus=0, num_gpus=options.gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
            runtime_env={"env_vars": {"BANYAN_NODE": options.node or options.node_ip}},
        )
        .remote(config.as_dict())
    )  # fmt: skip
    try:
        print(f"replica {config.replica} listens on {ray.get(actor.address.remote())}", flush=True)
    except Exception as error:
        raise LaunchError(sentence(error)) from None
    return actor


def end_on_signals(stopping: threading.Event) -> None:
    """SIGTERM and SIGINT ask for an orderly end. Again after ray.init, which takes SIGTERM over."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())


def keep(node: subprocess.Popen[bytes], stopping: threading.Event) -> None:
    """Return when SIGTERM came. Raises LaunchError if the node ended first: the pod restarts."""
    while not stopping.wait(1.0):
        if node.poll() is not None:
            raise LaunchError("This pod's Ray node ended.")


def leave(node: subprocess.Popen[bytes], actor: Any, grace_s: float) -> None:
    """Drain the replica, let it stop, end it for good, and take the node out of the cluster."""
    import ray

    if actor is not None:
        ray.wait([actor.drain.remote(grace_s)], timeout=grace_s + 5.0)
        ray.wait([actor.stop.remote()], timeout=STOP_S_MAX)
        ray.kill(actor, no_restart=True)
        ray.shutdown()
    node.terminate()
    try:
        node.wait(timeout=NODE_S_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(node.pid, signal.SIGKILL)


def main() -> int:
    """0 after an orderly stop; 1 with one sentence on stderr if it could not start or go on."""
    options = parse()
    stopping = threading.Event()
    end_on_signals(stopping)
    try:
        model = resolve_model(options.model)
        node, actor = start_node(options), None
        try:
            actor = place(options, replica_config(options, model))
            end_on_signals(stopping)
            keep(node, stopping)
        finally:
            leave(node, actor, options.grace_s)
    except BanyanError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
