"""CacheResets: lets one replica forget what its caches hold. It knows an engine and tiers; no
router and no request."""

from __future__ import annotations

import asyncio

from banyan.v1 import api_pb2
from kvstore.tiered import TieredStore
from seams.errors import NoReplica
from worker.engine.client import EngineClient
from worker.engine.messages import Forgotten

ENGINE_S_MAX = 10.0  # for the step under way
TIERS_S_MAX = 8.0  # for loads and stores under way


class CacheResets:
    """Lives on the server's loop; one reset after the other."""

    def __init__(self, replica: str, engine: EngineClient, tiers: TieredStore | None) -> None:
        self._replica = replica
        self._engine = engine
        self._tiers = tiers
        self._one = asyncio.Lock()

    async def run(self, *, tiers: bool) -> api_pb2.ReplicaReset:
        """Empty the device's cache, and with `tiers` all below it. The events are in the log when
        this returns.

        Raises NoReplica if the engine or a tier does not come to it.
        """
        async with self._one:
            if tiers and self._tiers is not None:
                dropped, below = await self._all(self._tiers)
            else:
                dropped, below = await self._device(), 0
        return api_pb2.ReplicaReset(
            replica=self._replica,
            blocks=dropped.blocks,
            blocks_in_use=dropped.in_use,
            tier_blocks=below,
        )

    async def _all(self, tiers: TieredStore) -> tuple[Forgotten, int]:
        """The device's, then the tiers' blocks. Nothing moves between them meanwhile: what came up
        after the first could go down again after the second."""
        tiers.pause()
        try:
            dropped = await self._device()
            below = await asyncio.to_thread(tiers.clear, TIERS_S_MAX)
            again = await self._device()  # which says what the tiers lost
        finally:
            tiers.resume()
        return Forgotten(dropped.blocks + again.blocks, dropped.in_use + again.in_use), below

    async def _device(self) -> Forgotten:
        loop = asyncio.get_running_loop()
        forgotten: asyncio.Future[Forgotten] = loop.create_future()

        def settle(found: Forgotten) -> None:
            if not forgotten.done():  # nobody waits any more
                forgotten.set_result(found)

        def done(found: Forgotten) -> None:
            loop.call_soon_threadsafe(settle, found)

        self._engine.forget_cache(done)
        try:
            async with asyncio.timeout(ENGINE_S_MAX):
                return await forgotten
        except TimeoutError:
            raise NoReplica("The replica's engine did not get to it in time.") from None
