"""Listener: the one listening socket of a replica, with health and reflection beside its services.

Health service names: "" is liveness (the loop answers), "ready" is readiness.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from banyan.v1 import internal_pb2, internal_pb2_grpc
from seams.errors import LaunchError
from seams.limits import MESSAGE_BYTES_MAX

READY = "ready"
RPCS_MAX = 8192  # open at once, direct streams included; more wait in their connections
CLOSE_GRACE_S = 0.5
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # a port in use is an error, never shared
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),  # a client that vanished frees its blocks
    ("grpc.keepalive_timeout_ms", 20_000),
]


class Listener:
    """A grpc.aio server on exactly one address. Used on its loop only."""

    def __init__(self, listen: str) -> None:
        self._listen = listen
        self._server: grpc.aio.Server | None = None
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._ready: bool | None = None

    async def open(self, service: internal_pb2_grpc.ReplicaServicer) -> int:
        """Listen and serve; returns the port. Raises LaunchError if it cannot be bound."""
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=RPCS_MAX)
        add: Any = internal_pb2_grpc.add_ReplicaServicer_to_server
        add(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [internal_pb2.DESCRIPTOR.services_by_name["Replica"].full_name]
        names += [health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, server)
        try:
            port = server.add_insecure_port(self._listen)
        except RuntimeError:
            port = 0
        if port == 0:
            raise LaunchError("The replica's port is busy or its address is not this machine's.")
        await server.start()
        self._server = server
        await self.set_ready(True)
        return port

    async def set_ready(self, ready: bool) -> None:
        """Answer readiness probes so from now on. Mutates nothing if it is so already."""
        if ready != self._ready:
            self._ready = ready
            status = health_pb2.HealthCheckResponse
            await self._health.set(READY, status.SERVING if ready else status.NOT_SERVING)

    async def close(self) -> None:
        """Stop listening at once, end what is open after a short grace. Safe to repeat."""
        if self._server is not None:
            await self._server.stop(CLOSE_GRACE_S)
            self._server = None
