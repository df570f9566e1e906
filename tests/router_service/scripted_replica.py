"""A replica that speaks the real protocol over loopback and follows a script. Knows no engine.

Its tokens are a hash of everything before them, so a duplicate, a gap or a lost token shows.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from banyan.v1 import api_pb2, common_pb2, internal_pb2, internal_pb2_grpc
from kvstore.keys import ChainSpec, chain, root, tokens_u32le
from seams.errors import BanyanError
from seams.proof import matches, replica_proof, router_proof, session_token
from seams.textfiles import template_fingerprint, tokenizer_fingerprint

BLOCK_TOKENS = 16
END = 256  # the one special token
VOCAB = 300
CONTEXT = 2048
SECRET = bytes(range(32))
_epochs = itertools.count(1)


def make_text_files() -> dict[str, bytes]:
    """A tokenizer whose ids are bytes, and a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"chat_template": template}).encode(),
    }


def _byte_of(char: str) -> int:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if ord(char) < 256:
        return ord(char)
    return [b for b in range(256) if b not in plain][ord(char) - 256]


TEXT_FILES = make_text_files()


def token_after(tokens: list[int], seed: int, choice: int) -> int:
    """The next token: printable, and a function of all before it."""
    digest = hashlib.sha256(tokens_u32le(tokens) + f"{seed}/{choice}".encode()).digest()
    return 0x61 + digest[0] % 26


def expected(prompt: list[int], seed: int, count: int, choice: int = 0) -> list[int]:
    """What an unbroken stream gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(token_after(tokens, seed, choice))
    return tokens[len(prompt) :]


Write = Callable[[internal_pb2.Frame], Awaitable[None]]


def _one_at_a_time(write: Write) -> Write:
    lock = asyncio.Lock()

    async def locked(frame: internal_pb2.Frame) -> None:
        async with lock:
            await write(frame)

    return locked


@dataclass
class Script:
    """How a replica behaves. Hooks see (replica, submit, position) and may do anything."""

    token_s: float = 0.0
    tokens_per_frame: int = 1
    cached_tokens: int = 0
    end_after: int | None = None  # emits END as this token
    text: bytes | None = None  # emits these bytes instead of the hash
    before_token: Callable[[ScriptedReplica, internal_pb2.Submit, int], None] | None = None
    reply: Callable[[internal_pb2.Submit], list[internal_pb2.Emission]] | None = None
    fetchable: bool = True
    resets: Callable[[api_pb2.ResetCacheRequest], api_pb2.ReplicaReset] | None = None


@dataclass
class _Run:
    submit: internal_pb2.Submit
    credit: asyncio.Condition = field(default_factory=asyncio.Condition)
    limit: int = 0
    cancelled: bool = False
    task: asyncio.Task[None] | None = None


class ScriptedReplica(internal_pb2_grpc.ReplicaServicer):
    """One start of a replica. `die` drops every connection at once."""

    def __init__(self, name: str, script: Script | None = None, epoch: int | None = None) -> None:
        self.name = name
        self.epoch = next(_epochs) if epoch is None else epoch
        self.script = script or Script()
        self.submits: list[internal_pb2.Submit] = []
        self.cancels: list[str] = []
        self.granted = 0
        self.emitted = 0
        self.runs: dict[str, _Run] = {}
        self.attached = asyncio.Event()
        self.refusal = ""
        self.refused_as = ""
        self.events_seen: list[internal_pb2.EventControl] = []
        self.draining = False
        self.stalled = False
        self.beating = True
        self.tokens: set[str] = set()
        self.address = ""
        self._server: grpc.aio.Server | None = None
        self._links: list[asyncio.Task[None]] = []
        self._executes: list[Any] = []  # contexts of the open Execute streams
        self._seq = 0
        self.dead = False
        self.change_hello: Callable[[internal_pb2.Hello], None] = lambda hello: None

    async def start(self, router: str) -> None:
        """Serve, and attach to the router's internal address."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        internal_pb2_grpc.add_ReplicaServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._links.append(asyncio.create_task(self._attach(router)))

    async def die(self) -> None:
        """As SIGKILL: nothing is said, all connections break."""
        self.dead = True
        for task in self._links:
            task.cancel()
        for run in self.runs.values():
            if run.task is not None and run.task is not asyncio.current_task():
                run.task.cancel()
        if self._server is not None:
            await self._server.stop(0)
        await asyncio.gather(*self._links, return_exceptions=True)

    def cut(self) -> None:
        """Every Execute stream breaks; the replica lives on."""
        executes, self._executes = self._executes, []
        for context in executes:
            end = context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            self._links.append(asyncio.create_task(end))

    # ---- what it says of itself ------------------------------------------------------------------

    def hello(self) -> internal_pb2.Hello:
        root_id = root("model-fingerprint", "", BLOCK_TOKENS)
        probe = list(range(40))
        keys = chain(ChainSpec(root_id, BLOCK_TOKENS, b"salt", 0), probe)
        hello = internal_pb2.Hello(
            protocol=1,
            replica=self.name,
            epoch=self.epoch,
            address=self.address,
            host="h",
            node=self.name,
            block_tokens=BLOCK_TOKENS,
            numeric_class="scripted",
            representation="scripted",
            models=[
                internal_pb2.ServedModel(
                    root_id=root_id,
                    name="scripted",
                    context_tokens=CONTEXT,
                    model_fingerprint="model-fingerprint",
                    tokenizer_fingerprint=tokenizer_fingerprint(TEXT_FILES),
                    template_fingerprint=template_fingerprint(TEXT_FILES),
                    vocab_tokens=VOCAB,
                    eos_token_ids=[END],
                )
            ],
            kv_groups=[internal_pb2.KVGroupInfo(id=0, kind="full", layers=1, block_bytes=1024)],
            capacities=[internal_pb2.TierCapacity(tier=0, blocks=4096)],
            priors=internal_pb2.Priors(prefill_s_per_token=1e-5, step_s=1e-3),
            probe=internal_pb2.ProbeChain(
                root_id=root_id, token_ids=probe, salt=b"salt", keys=b"".join(keys)
            ),
        )
        self.change_hello(hello)
        return hello

    async def _attach(self, router: str) -> None:
        up = internal_pb2.AttachUp
        async with grpc.aio.insecure_channel(router) as channel:
            call = internal_pb2_grpc.FleetStub(channel).Attach()
            nonce = hashlib.sha256(f"{self.name}/{self.epoch}".encode()).digest()
            await call.write(up(greeting=internal_pb2.Greeting(nonce=nonce)))
            challenge = (await call.read()).challenge
            assert matches(router_proof(SECRET, nonce, challenge.nonce), challenge.proof)
            self.tokens.add(session_token(SECRET, "execute", nonce, challenge.nonce))
            proof = replica_proof(SECRET, nonce, challenge.nonce)
            await call.write(up(proof=internal_pb2.Proof(proof=proof)))
            await call.write(up(hello=self.hello()))
            down = await call.read()
            if down is grpc.aio.EOF or down.HasField("refusal"):
                self.refusal = "ended" if down is grpc.aio.EOF else down.refusal.message
                self.refused_as = "" if down is grpc.aio.EOF else down.refusal.error
                self.attached.set()
                return
            token = session_token(SECRET, "events", nonce, challenge.nonce)
            events = asyncio.create_task(self._events(channel, token))
            self._links.append(events)
            self.attached.set()
            while True:
                if self.beating:
                    load = internal_pb2.Load(
                        blocks_total=4096,
                        blocks_free=4096,
                        steps=1 + self.emitted,
                        stalled=self.stalled,
                    )
                    beat = internal_pb2.Heartbeat(load=load, draining=self.draining)
                    await call.write(up(heartbeat=beat))
                await asyncio.sleep(down.welcome.heartbeat_ms / 1000)

    async def _events(self, channel: grpc.aio.Channel, token: str) -> None:
        stub = internal_pb2_grpc.FleetStub(channel)
        call = stub.Events(metadata=(("banyan-session", token),))
        first = internal_pb2.EventBatch(
            replica=self.name, epoch=self.epoch, seq=1, snapshot=True, snapshot_last=True
        )
        await call.write(first)
        async for control in call:
            self.events_seen.append(control)

    # ---- Replica service -------------------------------------------------------------------------

    async def TextFiles(self, request: Any, context: Any) -> AsyncIterator[api_pb2.FileChunk]:
        assert dict(context.invocation_metadata())["banyan-session"] in self.tokens
        if not self.script.fetchable:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        assert request.fingerprint == tokenizer_fingerprint(TEXT_FILES)
        for name, data in TEXT_FILES.items():
            half = len(data) // 2
            yield api_pb2.FileChunk(name=name, data=data[:half])
            yield api_pb2.FileChunk(name=name, data=data[half:], last=True)

    async def ResetCache(self, request: Any, context: Any) -> api_pb2.ReplicaReset:
        assert dict(context.invocation_metadata())["banyan-session"] in self.tokens
        if self.script.resets is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        return self.script.resets(request)

    async def Execute(self, requests: AsyncIterator[Any], context: Any) -> None:
        if dict(context.invocation_metadata()).get("banyan-session") not in self.tokens:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no session")
        mine: list[_Run] = []
        write = _one_at_a_time(context.write)
        self._executes.append(context)
        try:
            async for up in requests:
                await self._take(up, write, mine)
        finally:
            for run in mine:
                if run.task is not None:
                    run.task.cancel()

    async def _take(self, up: internal_pb2.ExecuteUp, write: Write, mine: list[_Run]) -> None:
        kind = up.WhichOneof("message")
        if kind == "submit":
            self.submits.append(up.submit)
            run = _Run(up.submit, limit=up.submit.credit_tokens)
            self.runs[up.submit.request_id] = run
            mine.append(run)
            run.task = asyncio.create_task(self._guarded(run, write))
            return
        run = self.runs.get(getattr(up, kind).request_id)
        if kind == "cancel":
            self.cancels.append(up.cancel.request_id)
        if run is None:
            return
        async with run.credit:
            if kind == "cancel":
                run.cancelled = True
            else:
                self.granted += up.credit.tokens
                run.limit += up.credit.tokens
            run.credit.notify_all()

    async def _guarded(self, run: _Run, write: Write) -> None:
        try:
            await self._generate(run, write)
        except BanyanError as error:
            failed = common_pb2.Status(code=int(error.status), message=error.message)
            await self._send(run, write, error=failed, last=True)
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            pass

    async def _generate(self, run: _Run, write: Write) -> None:
        submit, script = run.submit, self.script
        if script.reply is not None:
            for emission in script.reply(submit):
                emission.request_id = submit.request_id
                await write(internal_pb2.Frame(emissions=[emission]))
            return
        count = submit.sampling.max_tokens
        position = len(submit.token_ids) - submit.prompt_tokens
        rows = [list(submit.token_ids) for _ in range(submit.sampling.n)]
        allowed = position
        while position < count:
            async with run.credit:
                await run.credit.wait_for(
                    lambda: run.cancelled or run.limit > position - allowed  # noqa: B023
                )
            if run.cancelled:
                break
            if script.before_token is not None:
                script.before_token(self, submit, position)
            if self.dead:
                return
            await asyncio.sleep(script.token_s)
            room = min(count, allowed + run.limit) - position
            step = max(1, min(script.tokens_per_frame, room))
            ended = await self._step(run, write, rows, position, step)
            position += step
            if ended:
                return
        await self._send(
            run,
            write,
            finish=common_pb2.FINISH_REASON_CANCELLED,
            last=True,
            usage=self._usage(submit),
        )

    async def _step(
        self, run: _Run, write: Write, rows: list[list[int]], position: int, step: int
    ) -> bool:
        submit, script, frame = run.submit, self.script, internal_pb2.Frame()
        ended = position + step >= submit.sampling.max_tokens
        for choice, tokens in enumerate(rows):
            ids = []
            for at in range(position, position + step):
                ids.append(self._token(tokens, submit, choice, at))
                tokens.append(ids[-1])
            stopped = script.end_after is not None and END in ids
            ended = ended or stopped
            emission = frame.emissions.add(
                request_id=submit.request_id, choice=choice, position=position, token_ids=ids
            )
            if submit.sampling.HasField("logprobs"):
                for token_id in ids:
                    entry = emission.logprobs.add()
                    entry.chosen.token_id = token_id
                    for top in range(submit.sampling.logprobs):
                        entry.top.add(token_id=top, logprob=-1.0)
            if ended:
                emission.finish = (
                    common_pb2.FINISH_REASON_STOP if stopped else common_pb2.FINISH_REASON_LENGTH
                )
            self.emitted += len(ids)
        if ended:
            frame.emissions[-1].last = True
            frame.emissions[-1].usage.CopyFrom(self._usage(submit))
        await write(frame)
        return ended

    def _token(self, tokens: list[int], submit: internal_pb2.Submit, choice: int, at: int) -> int:
        if self.script.end_after is not None and at >= self.script.end_after:
            return END
        if self.script.text is not None:
            return self.script.text[at % len(self.script.text)]
        return token_after(tokens, submit.sampling.seed, choice)

    def _usage(self, submit: internal_pb2.Submit) -> common_pb2.Usage:
        cached = min(self.script.cached_tokens, submit.prompt_tokens)
        return common_pb2.Usage(
            prompt_tokens=submit.prompt_tokens,
            cached_tokens=cached,
            computed_tokens=submit.prompt_tokens - cached,
            recomputed_tokens=len(submit.token_ids) - submit.prompt_tokens,
        )

    async def _send(self, run: _Run, write: Write, **fields: Any) -> None:
        emission = internal_pb2.Emission(request_id=run.submit.request_id, **fields)
        await write(internal_pb2.Frame(emissions=[emission]))
