"""The Banyan service: what clients call. It validates, and hands each stream to a Relay."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from banyan.v1 import api_pb2, api_pb2_grpc, common_pb2, internal_pb2
from kvstore.keys import tokens_u32le
from router.config import RouterConfig
from router.metrics import Seen
from router.outbox import credit_for
from router.placement import Core, ModelEntry, Observed, Placement
from router.service.calls import Call, GrpcCall
from router.service.fleet import Fleet
from router.service.logs import note, where
from router.service.relay import Deadline, Relay, find_place, log_decision
from router.service.requests import (
    SEED_BITS,
    Minted,
    Served,
    build_spec,
    check_shape,
    text_bytes,
    tokenize,
)
from router.service.resets import reset_caches
from router.service.status import Context, abort, metadata_of
from router.stream import ClientStream, Phase, StreamSpec
from router.tenants import Tenant, Tenants
from router.text.model import TextModel
from router.traffic import Passage, Traffic
from seams.clock import Clock
from seams.errors import (
    BanyanError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NoReplica,
    Overloaded,
    RequestNotFound,
)
from seams.limits import check_message
from seams.proof import seal, token_digest
from seams.rng import Rng

CHUNK_BYTES = 256 * 1024
THREAD_BYTES = 16 * 1024  # longer texts are tokenized beside the loop
HUGE_BYTES = 256 * 1024  # few of these at a time: they would hold up everyone else's
HUGE_MAX = max(1, (os.cpu_count() or 1) // 2)
TICKET_TTL_MS = 30_000
TICKET_TTL_MS_MAX = 300_000
STOPPING = "The router is stopping; another one can go on."
PICK_BOOKED_S_MIN = 1.0  # a pick counts as load until the replica reports it itself

Response = TypeVar("Response")


class Api(api_pb2_grpc.BanyanServicer):
    """All client calls of one router. Lives on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        secret: bytes,
        core: Core,
        fleet: Fleet,
        clock: Clock,
        rng: Rng,
    ) -> None:
        self._config = config
        self._secret = secret
        self._core = core
        self._fleet = fleet
        self._clock = clock
        self._rng = rng
        self._tenants = Tenants(config.api_keys, secret)
        self._owners: OrderedDict[str, str] = OrderedDict()  # request id -> tenant
        self._relays: set[Relay] = set()
        self._huge = asyncio.Semaphore(HUGE_MAX)
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._started_s = clock.now()
        self.traffic = Traffic()
        self._stopping = False

    # ---- Generate --------------------------------------------------------------------------------

    async def Generate(self, request: api_pb2.GenerateRequest, context: Context) -> None:
        """Streams one answer; see proto/banyan/v1/api.proto for what the client may rely on."""
        await self._ended_with_status(context, self.generate(request, GrpcCall(context)))

    async def generate(self, request: api_pb2.GenerateRequest, call: Call) -> None:
        """Serve one stream to its end, whatever protocol asked. Raises BanyanError."""
        try:
            with Passage(self.traffic, self._clock) as passage:
                await self._generate(request, call, passage)
        except BanyanError:
            raise
        except Exception as error:
            raise _unexpected(error) from None

    async def _generate(
        self, request: api_pb2.GenerateRequest, call: Call, passage: Passage
    ) -> None:
        if self._stopping:
            raise NoReplica(STOPPING)
        if self._calls >= self._config.streams_max:
            raise Overloaded("The router serves as many streams as it may.")
        self._calls += 1
        self._idle.clear()
        try:
            await self._serve(request, call, passage)
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def _serve(self, request: api_pb2.GenerateRequest, call: Call, passage: Passage) -> None:
        deadline = Deadline(self._clock, call.remaining_s)
        spec = await self._spec(request, call, deadline)
        await call.accepted(spec.request_id)
        stream = ClientStream(spec, self._clock, max(2, self._fleet.replicas))

        def placed(placement: Placement) -> None:
            passage.placed()
            self._placed(spec.tenant, placement)

        async def write(response: api_pb2.GenerateResponse) -> None:
            passage.deliver(response)
            await call.write(response)

        relay = Relay(
            stream, self._core, self._fleet, deadline, self._config.queue_wait_s_max, placed
        )
        self._relays.add(relay)
        try:
            await relay.run(write)
        finally:
            self._relays.discard(relay)

    async def _spec(
        self, request: api_pb2.GenerateRequest, call: Call, deadline: Deadline
    ) -> StreamSpec:
        """The request, checked and tokenized: nothing of it has reached a replica yet."""
        tenant = self.identify(call.authorization).narrowed(call.cache_salt)
        check_message(request)
        check_shape(request)
        served = await self._served(request.model, deadline)
        prompt = await self._tokenized(request, served.text)
        minted = Minted(
            request_id=f"{self._rng.bits(128):032x}",
            seed=self._rng.bits(SEED_BITS),
            credit_tokens=self._credit(request.sampling, call.siblings),
        )
        return build_spec(request, prompt, served, tenant, minted)

    def _credit(self, sampling: common_pb2.Sampling, siblings: int) -> int:
        """Siblings fill one client's buffer between them."""
        logprobs = sampling.logprobs if sampling.HasField("logprobs") else None
        return credit_for(max(1, sampling.n) * siblings, logprobs, self._config.credit_tokens)

    def identify(self, authorization: str) -> Tenant:
        """Who is calling. Raises Unauthenticated."""
        return self._tenants.identify(authorization)

    async def tokens(self, request: api_pb2.GenerateRequest) -> tuple[list[int], Served]:
        """The ids a prompt would have, and the model that would get them. Raises BanyanError."""
        check_message(request)
        served = await self._served(request.model, Deadline(self._clock, None))
        return await self._tokenized(request, served.text), served

    def text_of(self, name: str) -> TextModel | None:
        """The text side of a model that is served now; None where it takes token ids only."""
        served = self._fleet.served(name)
        return None if served is None else served.text

    def models(self) -> dict[str, ModelEntry]:
        """What replicas serve now, by name."""
        return self._core.models()

    async def _tokenized(
        self, request: api_pb2.GenerateRequest, text: TextModel | None
    ) -> list[int]:
        size = text_bytes(request)
        if size <= THREAD_BYTES:
            return tokenize(request, text)
        if size <= HUGE_BYTES:
            return await asyncio.to_thread(tokenize, request, text)
        await self._huge.acquire()
        work = asyncio.create_task(asyncio.to_thread(tokenize, request, text))
        work.add_done_callback(self._tokenized_huge)
        return await asyncio.shield(work)  # a thread goes on although its caller has gone

    def _tokenized_huge(self, work: asyncio.Task[list[int]]) -> None:
        self._huge.release()
        if not work.cancelled():
            work.exception()  # nobody else asks for it where the caller has gone

    def _placed(self, tenant: str, placement: Placement) -> None:
        """Log the decision and note whose it is; owners go in the order in which decisions do."""
        log_decision(placement)
        self._owners.pop(placement.request_id, None)
        self._owners[placement.request_id] = tenant
        if len(self._owners) > self._config.decisions_kept:
            self._owners.popitem(last=False)

    async def _served(self, name: str, deadline: Deadline) -> Served:
        """The model a request names; waits for it where replicas may still be attaching."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._wait_s(deadline)
        while True:
            if self._stopping:
                raise NoReplica(STOPPING)
            served = self._lookup(name)
            if served is not None:
                return served
            if not await self._fleet.change(due_s - loop.time()):
                raise NoReplica("No replica is attached.")

    def _lookup(self, name: str) -> Served | None:
        """None while it is too early to say. Raises ModelNotFound, InvalidRequest."""
        if name and (named := self._fleet.served(name)) is not None:
            return named
        names = self._fleet.model_names()
        if not name and len(names) > 1:
            raise InvalidRequest("Several models are served; GenerateRequest.model must name one.")
        served = self._fleet.served(names[0]) if names and not name else None
        age_s = self._clock.now() - self._started_s
        if served is None and names and age_s > self._config.lease_ms / 1000:
            raise ModelNotFound(f"No replica serves a model {name[:64]!r}.")
        return served

    def _wait_s(self, deadline: Deadline) -> float:
        left_s = deadline.left_s
        wait_s = self._config.queue_wait_s_max
        return wait_s if left_s is None else min(wait_s, left_s)

    # ---- Pick and Explain ------------------------------------------------------------------------

    async def Pick(self, request: api_pb2.PickRequest, context: Context) -> api_pb2.PickResponse:
        """Chooses a replica for a client that streams from it directly, and seals the choice."""
        return await self._ended_with_status(context, self._pick(request, context))

    async def _pick(self, request: api_pb2.PickRequest, context: Context) -> api_pb2.PickResponse:
        tenant = self.identify(metadata_of(context, "authorization"))
        check_message(request)
        if request.request.stop:
            raise InvalidRequest("A direct stream cannot have stop strings.")
        deadline = Deadline(self._clock, context.time_remaining())
        spec = await self._spec(request.request, GrpcCall(context), deadline)
        stream = self._unfinished(spec)
        placement = await find_place(
            self._core,
            self._fleet,
            lambda: stream.place_request(frozenset()),
            self._wait_s(deadline),
        )
        self._placed(tenant.name, placement)
        ttl_ms = min(request.ticket_ttl_ms or TICKET_TTL_MS, TICKET_TTL_MS_MAX)
        self._release_later(placement, ttl_ms / 1000)
        return self._picked(spec, placement, tenant, ttl_ms)

    def _unfinished(self, spec: StreamSpec) -> ClientStream:
        stream = ClientStream(spec, self._clock)
        if stream.phase is Phase.OVER:
            raise InvalidRequest("The resumed stream has emitted all of its tokens already.")
        return stream

    def _release_later(self, placement: Placement, ttl_s: float) -> None:
        """The router does not see the stream end: its booking gives way to the replica's own
        reports after the predicted time."""
        chosen = placement.decision.candidates[:1]
        predicted_s = sum(candidate.total_s for candidate in chosen)
        booked_s = min(ttl_s, max(PICK_BOOKED_S_MIN, predicted_s))
        loop = asyncio.get_running_loop()
        loop.call_later(booked_s, self._release, placement)

    def _release(self, placement: Placement) -> None:
        self._core.finished(placement.request_id, None, Observed())  # nobody reports to us

    def _picked(
        self, spec: StreamSpec, placement: Placement, tenant: Tenant, ttl_ms: int
    ) -> api_pb2.PickResponse:
        tokens = [*spec.prompt, *spec.emitted]
        body = internal_pb2.TicketBody(
            request_id=spec.request_id,
            replica=placement.replica,
            epoch=placement.epoch,
            root_id=spec.root_id,
            token_digest=token_digest(tokens_u32le(tokens), len(spec.prompt)),
            seed=spec.sampling.seed,
            tenant=tenant.name,
            expires_unix_ms=time.time_ns() // 1_000_000 + ttl_ms,
            prompt_tokens=len(spec.prompt),
            priority=spec.priority,
        )
        decision = common_pb2.Decision()
        decision.CopyFrom(placement.decision)
        decision.prompt_tokens = len(spec.prompt)
        return api_pb2.PickResponse(
            replica=placement.replica,
            address=placement.address,
            ticket=seal(self._secret, body.SerializeToString()),
            request_id=spec.request_id,
            seed=spec.sampling.seed,
            model=spec.model,
            root_id=spec.root_id,
            token_ids=tokens,
            decision=decision,
        )

    async def Explain(
        self, request: api_pb2.ExplainRequest, context: Context
    ) -> api_pb2.ExplainResponse:
        """The recorded decision of a request of the caller's tenant, or a dry run."""
        return await self._ended_with_status(context, self._explain(request, context))

    async def _explain(
        self, request: api_pb2.ExplainRequest, context: Context
    ) -> api_pb2.ExplainResponse:
        tenant = self.identify(metadata_of(context, "authorization"))
        check_message(request)
        kind = request.WhichOneof("what")
        if kind is None:
            raise InvalidRequest("The request names neither a request id nor a request.")
        if kind == "request":
            deadline = Deadline(self._clock, context.time_remaining())
            spec = await self._spec(request.request, GrpcCall(context), deadline)
            stream = self._unfinished(spec)
            decision = self._core.preview(stream.place_request(frozenset()))
            return api_pb2.ExplainResponse(decision=decision)
        found = self._core.explain(request.request_id)
        if found is None or self._owners.get(request.request_id) != tenant.name:
            raise RequestNotFound("No decision is kept under this request id.")
        return api_pb2.ExplainResponse(decision=found)

    # ---- questions -------------------------------------------------------------------------------

    async def ListModels(
        self, request: api_pb2.ListModelsRequest, context: Context
    ) -> api_pb2.ListModelsResponse:
        """The models that replicas serve now."""
        await self._ended_with_status(context, self._known_caller(context))
        models = [
            api_pb2.ModelInfo(
                name=name,
                context_tokens=entry.served.context_tokens,
                replicas=len(entry.replicas),
                tokenizer_fingerprint=entry.served.tokenizer_fingerprint,
            )
            for name, entry in sorted(self.models().items())
        ]
        return api_pb2.ListModelsResponse(models=models)

    async def ClusterState(
        self, request: api_pb2.ClusterStateRequest, context: Context
    ) -> api_pb2.ClusterStateResponse:
        """What this router knows of every replica."""
        await self._ended_with_status(context, self._known_caller(context))
        return api_pb2.ClusterStateResponse(
            router=self._config.router,
            uptime_s=self.uptime_s,
            replicas=self._core.state(),
            index_blocks=self._core.index_blocks,
            streams_open=self._calls,
        )

    @property
    def uptime_s(self) -> float:
        """Since the router started."""
        return self._clock.now() - self._started_s

    def seen(self) -> Seen:
        """What a scrape is written from."""
        return Seen(
            router=self._config.router,
            uptime_s=self.uptime_s,
            streams_open=self._calls,
            index_blocks=self._core.index_blocks,
            replicas=self._core.loads(),
            traffic=self.traffic,
        )

    async def ResetCache(
        self, request: api_pb2.ResetCacheRequest, context: Context
    ) -> api_pb2.ResetCacheResponse:
        """Every replica forgets its prefix cache, for whoever has the admin key."""
        return await self._ended_with_status(context, self._reset(request, context))

    async def _reset(
        self, request: api_pb2.ResetCacheRequest, context: Context
    ) -> api_pb2.ResetCacheResponse:
        self.check_admin(metadata_of(context, "authorization"))
        check_message(request)
        return await self.reset_cache(tiers=request.tiers)

    def check_admin(self, authorization: str) -> None:
        """Raises Unauthenticated or Forbidden for any key but the cluster's admin key."""
        self._tenants.check_admin(authorization)

    async def reset_cache(self, *, tiers: bool) -> api_pb2.ResetCacheResponse:
        """What every replica dropped; whoever calls has checked the admin key. Raises NoReplica if
        one did not answer."""
        note(logging.INFO, "cache reset asked for", tiers=tiers)
        replicas = await reset_caches(self._fleet.doors(), tiers=tiers)
        return api_pb2.ResetCacheResponse(replicas=replicas)

    async def TextFiles(
        self, request: api_pb2.TextFilesRequest, context: Context
    ) -> AsyncIterator[api_pb2.FileChunk]:
        """The files of a tokenizer fingerprint, whole, in chunks."""
        files = await self._ended_with_status(context, self._files(request, context))
        for name, content in files.items():
            for start in range(0, max(1, len(content)), CHUNK_BYTES):
                part = content[start : start + CHUNK_BYTES]
                last = start + CHUNK_BYTES >= len(content)
                yield api_pb2.FileChunk(name=name, data=part, last=last)

    async def _files(self, request: api_pb2.TextFilesRequest, context: Context) -> dict[str, bytes]:
        await self._known_caller(context)
        check_message(request)
        files = self._fleet.texts.files(request.fingerprint)
        if files is None:
            raise ModelNotFound("No served model has this tokenizer.")
        return files

    async def _known_caller(self, context: Context) -> None:
        self.identify(metadata_of(context, "authorization"))

    # ---- ends ------------------------------------------------------------------------------------

    async def _ended_with_status(self, context: Context, call: Awaitable[Response]) -> Response:
        """Every failure of one call becomes its typed status, and stays its own."""
        try:
            return await call
        except BanyanError as error:
            failure = error
        except Exception as error:
            failure = _unexpected(error)
        await abort(context, failure)

    async def drain(self, grace_s: float) -> None:
        """Refuse new streams, let running ones end; those left after `grace_s` end with an error
        that sends their clients to another router."""
        self._stopping = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            for relay in list(self._relays):
                relay.stop(NoReplica(STOPPING))
            self._fleet.wake()


def _unexpected(error: Exception) -> InternalError:
    note(logging.ERROR, "a call failed unexpectedly", **where(error))
    return InternalError("The router failed to process this request.")
