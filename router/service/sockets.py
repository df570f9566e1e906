"""Listening TCP sockets of a router's HTTP servers. Knows no protocol."""

from __future__ import annotations

import socket

from seams.errors import LaunchError


def split_host(address: str, purpose: str) -> tuple[str, int]:
    """host:port, taken apart; a host must be named. Raises LaunchError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise LaunchError(f"The router's {purpose} address {address} is no HOST:PORT.")
    return host.strip("[]"), int(port)


def take(address: str, purpose: str, backlog: int) -> tuple[socket.socket, str]:
    """A socket that listens on host:port, and that address with the real port. Raises
    LaunchError."""
    host, port = split_host(address, purpose)
    try:
        family, _, _, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        taken = socket.create_server(at[:2], family=family, backlog=backlog)
    except OSError:
        raise LaunchError(
            f"The router cannot listen on {address}: the port is busy or not ours."
        ) from None
    return taken, f"{address.rpartition(':')[0]}:{taken.getsockname()[1]}"
