"""RouterServer: its ports, the clock's tick, health, and an orderly stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from banyan.v1 import api_pb2, api_pb2_grpc, internal_pb2, internal_pb2_grpc
from router.config import RouterConfig
from router.gateway.routes import Gateway
from router.gateway.server import GatewayServer
from router.metrics import exposition
from router.placement import Core
from router.service.api import Api
from router.service.fleet import Fleet
from router.service.logs import note, where
from router.service.metrics_server import MetricsServer
from seams.clock import Clock
from seams.errors import LaunchError
from seams.limits import MESSAGE_BYTES_MAX
from seams.rng import Rng

TICK_S = 0.1
STOP_S = 2.0  # what the last writes may take once everything is to end
OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.so_reuseport", 0),  # a port in use is an error, never shared
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.keepalive_time_ms", 30_000),  # a client that vanished frees its stream
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),  # clients may check on us as well
    ("grpc.http2.max_ping_strikes", 0),
)
_Status = health_pb2.HealthCheckResponse.ServingStatus


def bind(server: grpc.aio.Server, address: str) -> str:
    """Listen on host:port and return it with the real port. Raises LaunchError."""
    host, _, _ = address.rpartition(":")
    try:
        port = server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if not port:
        raise LaunchError(f"The router cannot listen on {address}: the port is busy or not ours.")
    return f"{host}:{port}"


class RouterServer:
    """One router. `listen`, `internal`, `http` and `metrics` hold the real addresses once it is
    started; the latter two are "" if none was asked for."""

    def __init__(
        self, config: RouterConfig, secret: bytes, core: Core, clock: Clock, rng: Rng
    ) -> None:
        self.listen = ""
        self.internal = ""
        self.http = ""
        self.metrics = ""
        self._config = config
        self._core = core
        self._clock = clock
        self._fleet = Fleet(config, secret, core, clock, rng)
        self._api = Api(config, secret, core, self._fleet, clock, rng)
        self._gateway = GatewayServer(Gateway(self._api, lambda: self._ready).serve)
        self._scraped = MetricsServer(lambda: exposition(self._api.seen()))
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._ready = False
        self._servers: list[grpc.aio.Server] = []
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen on all ports. Raises LaunchError; then nothing is left behind."""
        public, internal = self._public(), self._internal()
        self.listen = bind(public, self._config.listen)
        self.internal = bind(internal, self._config.internal)
        await self._bind_http()
        await self._health.set("", _Status.SERVING)
        await self._health.set("ready", _Status.NOT_SERVING)
        for server in (public, internal):
            await server.start()
            self._servers.append(server)
        if self.http:
            await self._gateway.start()
        if self.metrics:
            await self._scraped.start()
        self._ticker = asyncio.create_task(self._keep_time())

    async def _bind_http(self) -> None:
        try:
            if self._config.http:
                self.http = self._gateway.bind(self._config.http)
            if self._config.metrics:
                self.metrics = self._scraped.bind(self._config.metrics)
        except LaunchError:
            await self._gateway.close(0.0)
            raise

    async def broken(self) -> None:
        """Returns once the router cannot go on: leases would never run out. It is to be stopped."""
        assert self._ticker is not None
        await asyncio.wait([self._ticker])

    def _public(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=OPTIONS)
        api_pb2_grpc.add_BanyanServicer_to_server(self._api, server)  # type: ignore[no-untyped-call]
        self._add_common(server, api_pb2.DESCRIPTOR.services_by_name["Banyan"].full_name)
        return server

    def _internal(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=OPTIONS)
        internal_pb2_grpc.add_FleetServicer_to_server(self._fleet, server)  # type: ignore[no-untyped-call]
        self._add_common(server, internal_pb2.DESCRIPTOR.services_by_name["Fleet"].full_name)
        return server

    def _add_common(self, server: grpc.aio.Server, service: str) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)

    async def _keep_time(self) -> None:
        try:
            await self._tick()
        except Exception as error:
            note(logging.ERROR, "the router's clock failed", **where(error))
            await self._health.set("", _Status.NOT_SERVING)

    async def _tick(self) -> None:
        """Let time pass for fleet and core. After a pause of this very process (a suspended
        machine) heartbeats wait to be read: they come before anyone's lease is judged."""
        pause_s = self._config.lease_ms / 2000
        while True:
            before_s = self._clock.now()
            await asyncio.sleep(TICK_S)
            if self._clock.now() - before_s > pause_s:
                note(logging.WARNING, "the router was paused")
                continue
            self._fleet.tick()
            await self._set_ready(any(s.state == "ready" for s in self._core.state()))

    async def _set_ready(self, ready: bool) -> None:
        if ready != self._ready:
            self._ready = ready
            note(logging.INFO, "ready" if ready else "not ready")
            await self._health.set("ready", _Status.SERVING if ready else _Status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Readiness off, running streams end or are sent elsewhere, then all ports close."""
        public, internal = self._servers
        if self._ticker is not None:
            self._ticker.cancel()
        await self._set_ready(False)
        closing = asyncio.create_task(public.stop(grace_s + STOP_S))
        self._gateway.stop_accepting()
        await self._api.drain(grace_s)
        await self._gateway.close(STOP_S)
        await closing
        await self._fleet.close()
        await internal.stop(0)
        await self._scraped.close()
