"""`banyan up --metrics`: where it leads, and what it says if it cannot."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from banyan.cluster.spec import ClusterSpec, metrics_addresses, router_addresses
from banyan.cluster.state import ClusterRecord, RouterRecord, _from_json
from seams.errors import LaunchError


def addresses(metrics: str, routers: int = 2, listen: str = "127.0.0.1:0") -> list[str]:
    spec = ClusterSpec("fake:full", routers=routers, listen=listen, metrics=metrics)
    return metrics_addresses(spec, router_addresses(spec))


def free_port() -> int:
    """The first of two that are free; they lie below those that the system gives to others."""
    for port in range(21000, 30000, 2):
        try:
            for each in (port, port + 1):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", each))
        except OSError:
            continue
        return port
    raise AssertionError("no two free ports")


def test_off_by_default() -> None:
    assert addresses("") == ["", ""]


def test_routers_take_the_next_ports_or_any() -> None:
    port = free_port()
    assert addresses(f"127.0.0.1:{port}") == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    assert addresses("127.0.0.1:0") == ["127.0.0.1:0"] * 2


def test_a_port_alone_is_of_the_loopback() -> None:
    port = free_port()
    assert addresses(str(port), 1) == [f"127.0.0.1:{port}"]
    assert addresses("0") == ["127.0.0.1:0"] * 2


@pytest.mark.parametrize("given", ["nonsense", ":9464", "127.0.0.1:", "127.0.0.1:x", "70000"])
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(LaunchError, match=r"^--metrics .* is no HOST:PORT\.$"):
        addresses(given)


def test_ports_that_are_taken() -> None:
    port = free_port()
    with pytest.raises(LaunchError, match=rf"--metrics and --listen both need 127\.0\.0\.1:{port}"):
        addresses(f"127.0.0.1:{port}", listen=f"127.0.0.1:{port}")
    with pytest.raises(LaunchError, match=r"both need"):
        addresses(f"127.0.0.1:{port + 1}", listen=f"127.0.0.1:{port}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(LaunchError, match=r"^--metrics .*: Cannot listen on .* in use already"):
            addresses(f"127.0.0.1:{port}")


def test_the_command_says_it_in_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "banyan", "up", "--metrics", "nonsense"]
    done = subprocess.run(
        [*command, "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"BANYAN_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "error: --metrics nonsense: nonsense is no HOST:PORT."
    assert not list(tmp_path.rglob("cluster.json"))


def test_a_record_written_before_there_were_metrics_is_read() -> None:
    process = {"role": "router-0", "pid": 1, "created_s": 0.0, "log": ""}
    router = {"name": "router-0", "listen": "a:1", "internal": "a:2", "process": process}
    fields = {"name": "c", "model": "m", "served_name": "m", "routers": [router], "ray": None}
    record = _from_json(json.loads(json.dumps(fields)))
    assert isinstance(record, ClusterRecord) and isinstance(record.routers[0], RouterRecord)
    assert record.routers[0].metrics == ""
