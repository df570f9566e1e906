"""Links: one RouterLink per router, following what the configured names resolve to."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket

from worker.service.router_link import LinkContext, RouterLink

log = logging.getLogger(__name__)

RESOLVE_EVERY_S = 10.0


async def resolve(address: str) -> set[str]:
    """host:port -> every ip:port behind it. A name with IPv4 addresses counts as IPv4 only, so that
    a router reachable both ways is not two. Raises OSError for a name nobody knows."""
    host, _, port = address.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        return {address}
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    v4 = {f"{peer[0]}:{port}" for family, *_, peer in found if family == socket.AF_INET}
    v6 = {f"[{peer[0]}]:{port}" for family, *_, peer in found if family == socket.AF_INET6}
    return v4 or v6


class Links:
    """One RouterLink per router address, following what the configured names resolve to."""

    def __init__(
        self,
        routers: tuple[str, ...],
        context: LinkContext,
        *,
        resolve_every_s: float = RESOLVE_EVERY_S,
    ) -> None:
        self._routers = routers
        self._context = context
        self._resolve_every_s = resolve_every_s
        self._links: dict[str, tuple[RouterLink, asyncio.Task[None]]] = {}
        self._unresolved: set[str] = set()

    @property
    def attached(self) -> int:
        """How many routers this replica is attached to now."""
        return sum(link.attached for link, _ in list(self._links.values()))

    @property
    def refusal(self) -> str:
        """Why a router refuses this replica, "" if none does. From any thread, as `attached`."""
        return next((link.refusal for link, _ in list(self._links.values()) if link.refusal), "")

    def beat(self) -> None:
        """Tell every attached router the present state at once."""
        for link, _ in self._links.values():
            link.beat()

    async def run(self) -> None:
        """Keep all links until cancelled."""
        try:
            while True:
                self._follow(await self._targets())
                pause_s = self._resolve_every_s * (0.75 + 0.5 * self._context.rng.random())
                await asyncio.sleep(pause_s)
        finally:
            tasks = [task for _, task in self._links.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _targets(self) -> set[str] | None:
        """All addresses now; None if some name could not be resolved (then none is given up)."""
        targets: set[str] = set()
        for address in self._routers:
            try:
                targets |= await resolve(address)
                self._unresolved.discard(address)
            except OSError:
                if address not in self._unresolved:
                    self._unresolved.add(address)
                    log.warning("the router name %s cannot be resolved; trying on", address)
        if self._unresolved:
            self._add(targets)
            return None
        return targets

    def _add(self, targets: set[str]) -> None:
        for target in sorted(targets - self._links.keys()):
            link = RouterLink(target, self._context)
            self._links[target] = (link, asyncio.ensure_future(link.run()))

    def _follow(self, targets: set[str] | None) -> None:
        """Add new targets; give up old ones once they are not attached (a name may lose an entry
        while its router still serves)."""
        if targets is None:
            return
        self._add(targets)
        for target in list(self._links.keys() - targets):
            link, task = self._links[target]
            if not link.attached:
                task.cancel()
                del self._links[target]
