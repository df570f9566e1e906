"""`banyan up --http`: where it leads, and what it says if it cannot."""

from __future__ import annotations

import pytest
from test_metrics_options import free_port

from banyan.cluster.spec import (
    ClusterSpec,
    http_addresses,
    metrics_addresses,
    router_addresses,
)
from seams.errors import LaunchError


def addresses(http: str, listen: str = "127.0.0.1:0", metrics: str = "") -> list[str]:
    spec = ClusterSpec("fake:full", routers=2, listen=listen, http=http, metrics=metrics)
    listens = router_addresses(spec)
    web = http_addresses(spec, listens)
    metrics_addresses(spec, listens, web)
    return web


def test_off_by_default_else_the_next_ports_or_any() -> None:
    assert addresses("") == ["", ""]
    port = free_port()
    assert addresses(str(port)) == [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
    assert addresses("127.0.0.1:0") == ["127.0.0.1:0"] * 2


def test_ports_that_two_options_want() -> None:
    port = free_port()
    with pytest.raises(LaunchError, match=rf"--http and --listen both need 127\.0\.0\.1:{port}"):
        addresses(str(port), listen=f"127.0.0.1:{port}")
    with pytest.raises(LaunchError, match=rf"--metrics and --http both need 127\.0\.0\.1:{port}"):
        addresses(str(port), metrics=str(port))
    with pytest.raises(LaunchError, match=r"^--http .* is no HOST:PORT\.$"):
        addresses("nonsense")
