"""`up`: routers, Ray head and replicas, started side by side; all of it or nothing remains.

It knows processes and files. What is ready is asked from the routers, as any client would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from banyan.cluster import processes, ray_head, state, stop, tiers
from banyan.cluster.interrupts import held_back
from banyan.cluster.processes import Process
from banyan.cluster.spec import (
    ClusterSpec,
    adapter_folders,
    check,
    cores,
    http_addresses,
    metrics_addresses,
    router_addresses,
    uses_gpu,
)
from banyan.cluster.state import ClusterRecord, RayRecord, RouterRecord
from banyan.home import locked, private_folder, write_private
from banyan.models import resolve_model, served_name
from router.config import RouterConfig
from seams.errors import BanyanError, LaunchError
from worker.config import ReplicaConfig

ROUTER_START_S_MAX = 30.0

Report = Callable[[str, float], None]
"""Called with a stage ("download", "convert", "ray", "routers", "replicas") and its share done."""


@dataclass
class _Launch:
    """One `up` in progress; `record` is what is on disk."""

    spec: ClusterSpec
    folder: Path
    record: ClusterRecord
    report: Report
    deadline_s: float
    fleet: subprocess.Popen[str] | None = None
    failure: str = ""
    built: set[str] = field(default_factory=set)

    def save(self, **changes: Any) -> None:
        self.record = state.save(replace(self.record, **changes))

    def check_time(self, waiting_for: str) -> None:
        if time.monotonic() > self.deadline_s:
            limit = f"{self.spec.timeout_s:.0f} s"
            raise LaunchError(f"The cluster is not up after {limit}: {waiting_for}.")


def up(spec: ClusterSpec, report: Report) -> ClusterRecord:
    """Start a cluster and return once every replica is ready at every router.

    Raises BanyanError with one sentence; then, as after Ctrl-C, nothing is left running.
    """
    check(spec)
    tiers.check_tiers(spec)
    path = state.prepare(spec.name)
    with locked(path / "lock"):
        _refuse_second(spec.name)
        listens = router_addresses(spec)
        web = http_addresses(spec, listens)
        scraped = metrics_addresses(spec, listens, web)
        model = resolve_model(spec.model, report)
        me = psutil.Process()
        record = ClusterRecord(
            name=spec.name,
            model=model,
            served_name=served_name(spec.model),
            replicas=tuple(f"replica-{i}" for i in range(spec.replicas)),
            started_unix_s=time.time(),
            launcher=Process("launcher", me.pid, me.create_time(), ""),
            api_key=next(iter(spec.api_keys), ""),
            nvme=tiers.nvme_directory(spec),
            redis=tiers.shown_redis(spec),
        )
        launch = _Launch(spec, path, record, report, time.monotonic() + spec.timeout_s)
        with _undone_on_failure(launch):
            launch.save()
            with held_back():
                _start_routers(launch, listens, web, scraped)
                _start_cache(launch)
                _start_ray(launch)
                _start_fleet(launch)
            _wait_routers(launch)
            tiers.wait_server(launch.record.cache, launch.folder / "run")
            _start_replicas(launch)
            _wait_replicas(launch)
            launch.save(phase="running", launcher=None)
    return launch.record


def _refuse_second(name: str) -> None:
    record = state.load(name)
    if record is None:
        return
    if any(process.alive() for process in record.processes()):
        raise LaunchError(
            f"Cluster {name} is running already: `banyan down --name {name}` ends it."
        )
    stop.clear(record)  # what a crash or a reboot left


@contextmanager
def _undone_on_failure(launch: _Launch) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with held_back():
            if launch.fleet is not None and launch.fleet.poll() is None:
                launch.fleet.kill()
                launch.fleet.wait()
            stop.clear(launch.record)
        raise


def _start_routers(launch: _Launch, listens: list[str], web: list[str], scraped: list[str]) -> None:
    run = private_folder(launch.folder / "run")
    env = ray_head.environment()
    records = []
    ports = zip(listens, web, scraped, strict=True)
    for index, (listen, http, metrics) in enumerate(ports):
        name = f"router-{index}"
        ready = run / f"{name}.ready.json"
        ready.unlink(missing_ok=True)
        config = RouterConfig(
            router=name,
            secret_file=str(launch.folder / "secret"),
            listen=listen,
            internal=f"{_internal_host(launch.spec)}:0",
            http=http,
            metrics=metrics,
            ready_file=str(ready),
            api_keys=launch.spec.api_keys,
        )
        config_file = run / f"{name}.json"
        write_private(config_file, json.dumps(config.__dict__))
        command = [sys.executable, "-m", "router", "--config", str(config_file)]
        process = processes.start(name, command, launch.folder / "logs" / f"{name}.log", env)
        records.append(RouterRecord(name, listen, "", process))
        launch.save(routers=tuple(records))


def _internal_host(spec: ClusterSpec) -> str:
    """Replicas of a joined Ray cluster may be elsewhere: then the address clients use."""
    return spec.listen.rpartition(":")[0] if spec.ray_address else "127.0.0.1"


def _start_cache(launch: _Launch) -> None:
    folder = launch.folder
    launch.save(cache=tiers.begin_server(launch.spec, folder / "run", folder / "logs"))


def _start_ray(launch: _Launch) -> None:
    namespace = f"banyan-{launch.spec.name}"
    if launch.spec.ray_address:
        token = os.environ.get("RAY_AUTH_TOKEN", "")
        launch.save(ray=RayRecord(launch.spec.ray_address, namespace, token))
        return
    launch.report("ray", 0.0)
    launch.save(ray=ray_head.start_head(launch.folder / "logs", namespace))


def _wait_routers(launch: _Launch) -> None:
    launch.report("routers", 0.0)
    deadline = time.monotonic() + ROUTER_START_S_MAX
    found: list[RouterRecord] = []
    for record in launch.record.routers:
        ready = launch.folder / "run" / f"{record.name}.ready.json"
        while not ready.is_file():
            if not record.process.alive():
                reason = processes.last_line(record.process.log) or "it said nothing"
                raise LaunchError(f"A router did not start: {reason}")
            if time.monotonic() > deadline:
                raise LaunchError(f"A router did not start within {ROUTER_START_S_MAX:.0f} s.")
            time.sleep(0.02)
        where = json.loads(ready.read_text())
        del where["pid"]
        found.append(replace(record, **where))
        launch.report("routers", len(found) / len(launch.record.routers))
    launch.save(routers=tuple(found))


def _start_fleet(launch: _Launch) -> None:
    """Begin the process that will speak to Ray: it loads Ray while the head still starts."""
    ray = launch.record.ray
    assert ray is not None
    with (launch.folder / "logs" / "fleet.log").open("wb") as log:
        launch.fleet = subprocess.Popen(
            [sys.executable, "-m", "banyan.cluster.fleet", "start"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd="/",
            start_new_session=True,
            env=ray_head.environment(ray),
        )


def _start_replicas(launch: _Launch) -> None:
    ray, fleet = launch.record.ray, launch.fleet
    assert ray is not None and fleet is not None and fleet.stdin is not None
    if ray.head is not None:
        ray = replace(ray, address=ray_head.wait_head(ray))
        launch.save(ray=ray)
    launch.report("ray", 1.0)
    order = {"address": ray.address, "namespace": ray.namespace, "replicas": _orders(launch)}
    with suppress(BrokenPipeError), fleet.stdin:  # if it is gone, its log says why
        fleet.stdin.write(json.dumps(order))
    threading.Thread(target=_read_fleet, args=(launch,), daemon=True).start()


def _orders(launch: _Launch) -> list[dict[str, Any]]:
    """What the fleet is told of each replica: its config, its share of the machine, its env."""
    spec = launch.spec
    threads = max(1, cores() // spec.replicas)
    share = cores() / spec.replicas
    gpu = uses_gpu(spec)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    env = dict.fromkeys(names, str(threads))
    env["PYTHONPATH"] = ray_head.environment()["PYTHONPATH"]
    configs = [
        ReplicaConfig(
            replica=name,
            model=launch.record.model,
            served_name=launch.record.served_name,
            routers=tuple(router.internal for router in launch.record.routers),
            secret_file=str(launch.folder / "secret"),
            device=spec.device,
            dtype=spec.dtype,
            compute=spec.compute,
            batch_invariant=spec.batch_invariant,
            threads=threads,
            pool_gib=_pool_gib(spec),
            context_tokens=spec.context_tokens,
            speculate=spec.speculate,
            adapters=adapter_folders(spec.adapters),
            host_gib=spec.host_gib,
            nvme=launch.record.nvme,
            nvme_gib=spec.nvme_gib,
            redis=tiers.redis_reference(spec, launch.folder / "run"),
            cold_codec=spec.cold_codec,
            kv_codec=spec.kv_codec,
            retention=spec.retention,
            calibration=str(Path(spec.calibration).resolve()) if spec.calibration else "",
            namespace=spec.name,
            progress_file=str(_progress_file(launch, name)),
        )
        for name in launch.record.replicas
    ]
    cpus = 0 if gpu else (int(share) if share >= 1 else share)
    return [
        {"config": config.as_dict(), "cpus": cpus, "gpus": int(gpu), "env": env}
        for config in configs
    ]


def _pool_gib(spec: ClusterSpec) -> float | None:
    """As asked; on CPU replicas share this machine's memory, so the default is divided."""
    if spec.pool_gib is not None or uses_gpu(spec):
        return spec.pool_gib
    spare = psutil.virtual_memory().available / 2**30 / 4 / spec.replicas
    return min(1.0, round(spare, 3))


def _read_fleet(launch: _Launch) -> None:
    assert launch.fleet is not None and launch.fleet.stdout is not None
    for line in launch.fleet.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            launch.built.add(event["replica"])
        elif event["event"] == "failed":
            launch.failure = event["message"]
    if launch.fleet.wait() != 0 and not launch.failure:
        reason = processes.last_line(str(launch.folder / "logs" / "fleet.log"))
        launch.failure = f"Ray could not place the replicas: {reason or 'it said nothing'}"


def _wait_replicas(launch: _Launch) -> None:
    """Until every router calls every replica ready."""
    from banyan.client import Client

    wanted = set(launch.record.replicas)
    missing = {router.name: wanted for router in launch.record.routers}
    clients = {r.name: Client(r.listen, launch.record.api_key, 2.0) for r in launch.record.routers}
    try:
        while any(missing.values()):
            for name, client in clients.items():
                if missing[name]:
                    missing[name] = wanted - _ready(client)
            seen = sum(len(wanted) - len(left) for left in missing.values())
            loaded = sum(_loaded(launch, name) for name in wanted)
            parts = len(wanted) * (2 + len(clients))  # loaded, warm, and seen by each router
            done = (loaded + len(launch.built) + seen) / parts
            launch.report("replicas", done)
            _check_alive(launch)
            launch.check_time(f"{len(launch.built)} of {len(wanted)} replicas have started")
            time.sleep(0.1)
    finally:
        for client in clients.values():
            client.close()


def _loaded(launch: _Launch, replica: str) -> float:
    """Share of its model that a replica has loaded; of one on another machine only 0 or 1."""
    if replica in launch.built:
        return 1.0
    try:
        return float(_progress_file(launch, replica).read_text())
    except (OSError, ValueError):  # not begun, or read while it is written
        return 0.0


def _progress_file(launch: _Launch, replica: str) -> Path:
    return launch.folder / "run" / f"{replica}.loaded"


def _ready(client: Any) -> set[str]:
    try:
        states = client.cluster_state().replicas
    except BanyanError:
        return set()
    return {replica.replica for replica in states if replica.state == "ready"}


def _check_alive(launch: _Launch) -> None:
    if launch.failure:
        raise LaunchError(launch.failure)
    for process in launch.record.processes():
        if not process.alive():
            reason = processes.last_line(process.log) or "it said nothing"
            raise LaunchError(f"The {process.role} process ended: {reason}")
