"""What a running cluster is, on disk, so that any shell can find and stop it. Starts nothing.

`${BANYAN_HOME}/clusters/NAME/` (0700): cluster.json, secret (0600), logs/, config files.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from banyan.cluster.processes import Process
from banyan.home import home, private_folder, write_private
from seams.errors import LaunchError

DEFAULT_NAME = "default"
STATE_FILE = "cluster.json"


@dataclass(frozen=True)
class RouterRecord:
    """One router process and where it listens."""

    name: str
    listen: str
    internal: str
    process: Process
    metrics: str = ""  # "" = it has none
    http: str = ""  # as well


@dataclass(frozen=True)
class RayRecord:
    """The Ray cluster that carries the replicas. `head` is None where one was joined."""

    address: str
    namespace: str
    token: str = ""
    temp_dir: str = ""
    head: Process | None = None


@dataclass(frozen=True)
class ClusterRecord:
    """The contents of cluster.json. `phase`: starting | running | stopping."""

    name: str
    model: str
    served_name: str
    phase: str = "starting"
    replicas: tuple[str, ...] = ()
    routers: tuple[RouterRecord, ...] = ()
    ray: RayRecord | None = None
    started_unix_s: float = 0.0
    launcher: Process | None = None  # the command that is bringing it up
    api_key: str = ""  # one of the cluster's, for this machine's own commands
    nvme: str = ""  # where the replicas' disk tiers are
    redis: str = ""  # "", "embedded" or a URL without its password
    cache: Process | None = None  # owns the embedded server

    @property
    def addresses(self) -> list[str]:
        """Where clients reach the routers."""
        return [router.listen for router in self.routers]

    def processes(self) -> list[Process]:
        """Every process this machine runs for the cluster, routers first."""
        found = [router.process for router in self.routers]
        if self.ray is not None and self.ray.head is not None:
            found.append(self.ray.head)
        if self.cache is not None:
            found.append(self.cache)
        return found


def folder(name: str) -> Path:
    """The state folder of cluster `name`. Raises LaunchError for a name that is no file name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", name):
        raise LaunchError("A cluster name has letters, digits, - and _ only, at most 63.")
    return home() / "clusters" / name


def prepare(name: str) -> Path:
    """Create the state folder, its logs folder and the secret where missing; returns the folder."""
    path = private_folder(folder(name))
    private_folder(path / "logs")
    if not (path / "secret").is_file():
        write_private(path / "secret", secrets.token_hex(32) + "\n")
    return path


def save(record: ClusterRecord) -> ClusterRecord:
    """Write cluster.json atomically; returns `record`."""
    write_private(folder(record.name) / STATE_FILE, json.dumps(asdict(record), indent=2) + "\n")
    return record


def load(name: str) -> ClusterRecord | None:
    """What cluster.json says, None if there is none. Raises LaunchError if that cannot be told."""
    try:
        fields = json.loads((folder(name) / STATE_FILE).read_text())
        return _from_json(fields)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise LaunchError(f"The state file of cluster {name} cannot be read.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise LaunchError(
            f"The state file of cluster {name} is damaged, so what it started cannot be found: end "
            f"what is left of its routers and of Ray, then remove {folder(name) / STATE_FILE}."
        ) from error


def _from_json(fields: dict[str, Any]) -> ClusterRecord:
    routers = tuple(
        RouterRecord(**(router | {"process": Process(**router["process"])}))
        for router in fields["routers"]
    )
    ray = fields["ray"]
    if ray is not None:
        head = Process(**ray["head"]) if ray["head"] else None
        ray = RayRecord(**(ray | {"head": head}))
    alone = {
        name: Process(**fields[name]) if fields.get(name) else None
        for name in ("launcher", "cache")
    }
    record = ClusterRecord(**(fields | {"routers": routers, "ray": ray} | alone))
    return replace(record, replicas=tuple(record.replicas))


def remove(name: str, *, everything: bool) -> None:
    """Forget a stopped cluster. The secret and the logs stay unless `everything`."""
    path = folder(name)
    if everything:
        shutil.rmtree(path, ignore_errors=True)
        return
    (path / STATE_FILE).unlink(missing_ok=True)
    shutil.rmtree(path / "run", ignore_errors=True)


def running(name: str) -> ClusterRecord:
    """The record of a cluster that is up. Raises LaunchError with what to do."""
    record = load(name)
    if record is None:
        raise LaunchError(f"No cluster {name} is running: start one with `banyan up`.")
    return record
