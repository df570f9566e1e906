"""Resetting the prefix caches of all replicas: one call to each, side by side. It decides nothing,
and the index hears of it as of any other change, by the replicas' own events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

from banyan.v1 import api_pb2, internal_pb2_grpc
from router.service.executors import SESSION_KEY, dial
from router.service.logs import note
from seams.errors import NoReplica

RESET_S_MAX = 15.0  # of one replica, which ends its step first
TIERS_S_MAX = 50.0  # more: their loads and stores, a shared one's deletions, and a step again


@dataclass(frozen=True)
class Door:
    """Where a replica is called outside its Execute stream. `token` is the session's for that."""

    replica: str
    address: str
    token: str


async def reset_caches(doors: Sequence[Door], *, tiers: bool) -> list[api_pb2.ReplicaReset]:
    """What each replica dropped, in the order of `doors`; all are asked whatever one says.

    Raises NoReplica, which names those that did not answer; the others have dropped theirs then.
    """
    if not doors:
        raise NoReplica("No replica is attached.")
    answers = await asyncio.gather(*(_reset(door, tiers) for door in doors))
    done = [answer for answer in answers if answer is not None]
    if len(done) < len(doors):
        silent = [d.replica for d, answer in zip(doors, answers, strict=True) if answer is None]
        reset = f"{len(done)} of {len(doors)} replicas have reset their cache"
        raise NoReplica(f"{reset}; {', '.join(silent)} did not.")
    return done


async def _reset(door: Door, tiers: bool) -> api_pb2.ReplicaReset | None:
    """None if it did not answer, or not in time."""
    request = api_pb2.ResetCacheRequest(tiers=tiers)
    try:
        async with dial(door.address) as channel:
            stub = internal_pb2_grpc.ReplicaStub(channel)  # type: ignore[no-untyped-call]
            metadata = ((SESSION_KEY, door.token),)
            limit_s = RESET_S_MAX + (TIERS_S_MAX if tiers else 0.0)
            answer = await stub.ResetCache(request, metadata=metadata, timeout=limit_s)
    except grpc.RpcError as error:
        code = error.code().name.lower() if isinstance(error, grpc.aio.AioRpcError) else ""
        note(logging.WARNING, "cache not reset", replica=door.replica, status=code)
        return None
    return api_pb2.ReplicaReset(
        replica=door.replica,
        blocks=answer.blocks,
        blocks_in_use=answer.blocks_in_use,
        tier_blocks=answer.tier_blocks,
    )
