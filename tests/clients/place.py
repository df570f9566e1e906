"""Where clients run: their virtual environments, an offline hub's cache with the tokenizer, and a
cluster of two replicas and two gateways. Knows no client and no report.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from base import HUB_NAME, Site

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".clients"
CLUSTER = "clients"
REVISION = "0" * 40
TEXT_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja",
)  # fmt: skip
INSTALL_S_MAX, RUN_S_MAX = 1800.0, 900.0


class NotRun(Exception):
    """A client could not be installed or did not end well; the sentence says why."""


def installed(venv: str, installs: Sequence[Sequence[str]]) -> Path:
    """The environment's folder of programs, made if it is not there with just these packages.
    Raises NotRun."""
    folder = HOME / "venvs" / venv
    done, wanted = folder / "installed.json", json.dumps([list(one) for one in installs])
    if not done.is_file() or done.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        _call([sys.executable, "-m", "venv", str(folder)], INSTALL_S_MAX)
        for one in installs:
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *one]
            _call(pip, INSTALL_S_MAX)
        done.write_text(wanted)
    return folder / "bin"


def hub(tokenizer: Path) -> Path:
    """A hub's cache that holds the tokenizer under HUB_NAME; the value of HF_HOME."""
    model = HOME / "hub/hub" / f"models--{HUB_NAME.replace('/', '--')}"
    snapshot = model / "snapshots" / REVISION
    shutil.rmtree(model, ignore_errors=True)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(REVISION)
    for name in TEXT_FILES:
        if (tokenizer / name).is_file():
            (snapshot / name).symlink_to(tokenizer / name)
    return HOME / "hub"


def call_client(programs: Path, command: Sequence[str], site: Site) -> None:
    """Run a client to its end, offline. What it says is kept in said.txt. Raises NotRun."""
    env = os.environ | {
        "HF_HOME": str(HOME / "hub"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1", "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "OPENAI_API_KEY": "none",
    }  # fmt: skip
    with (site.folder / "said.txt").open("w") as said:
        _call([str(programs / command[0]), *command[1:]], RUN_S_MAX, env, said.fileno())


def _call(
    command: Sequence[str], limit_s: float, env: dict[str, str] | None = None, out: int = -1
) -> str:
    """What it wrote. Raises NotRun."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE if out < 0 else out, stderr=subprocess.STDOUT,
            text=True, env=env, timeout=limit_s, check=False,
        )  # fmt: skip
    except OSError as error:
        raise NotRun(f"{name} cannot be started: {error.strerror}.") from None
    except subprocess.TimeoutExpired:
        raise NotRun(f"{name} did not end within {limit_s:.0f} s.") from None
    if done.returncode:
        last = (done.stdout or "").strip().splitlines()[-1:] or ["see said.txt"]
        raise NotRun(f"{name} ended with {done.returncode}: {last[0][:200]}")
    return done.stdout or ""


@contextmanager
def cluster() -> Iterator[list[str]]:
    """A cluster of the demo model; the URLs of its gateways. Raises NotRun."""
    options = ("--model", "demo", "--replicas", "2", "--routers", "2", "--device", "cpu")
    ports = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--timeout-s", "600")
    try:
        said = _banyan("up", "--name", CLUSTER, *options, *ports, "--json")
        record, _ = json.JSONDecoder().raw_decode(said, said.index("{\n"))
        routers = record["routers"]
        yield [f"http://{router['http']}" for router in routers]
    finally:
        _banyan("down", "--name", CLUSTER)


def own_bench(url: str, arguments: Sequence[str], folder: Path) -> Path:
    """`banyan bench run` over HTTP; the file of records that it wrote. Raises NotRun."""
    out = folder / "own"
    _banyan("bench", "run", *arguments, "--target", f"{url}/v1", "--out", str(out))
    return out / "requests.jsonl"


def _banyan(*arguments: str) -> str:
    return _call([sys.executable, "-m", "banyan", *arguments], RUN_S_MAX)
