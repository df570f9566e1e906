"""Peers of a replica for its tests: a router that serves Fleet and dials Execute, over loopback."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc

from banyan.v1 import common_pb2, internal_pb2, internal_pb2_grpc
from kvstore.keys import tokens_u32le
from seams.proof import matches, replica_proof, router_proof, seal, session_token, token_digest

StartReplica = Callable[..., Any]
"""start(blocks=256, on_failure=None, **ReplicaConfig fields) -> Replica, listening and linked."""

SECRET = bytes(range(32))
WAIT_S = 20.0


def eventually(check: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    """The first true value of `check`; fails after `within_s`."""
    until = time.monotonic() + within_s
    while not (value := check()):
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.01)
    return value


class FakeRouter(internal_pb2_grpc.FleetServicer):
    """Serves Attach and Events on a free port and remembers what came."""

    def __init__(self, secret: bytes = SECRET, port: int = 0, name: str = "router-0") -> None:
        self.secret = secret
        self.name = name
        self.refuse: common_pb2.Status | None = None
        self.heartbeat_ms = 50
        self.read_events = True
        self.hellos: list[internal_pb2.Hello] = []
        self.beats: list[internal_pb2.Heartbeat] = []
        self.batches: list[internal_pb2.EventBatch] = []
        self.attempts = 0
        self.events_streams = 0
        self.nonces: list[tuple[bytes, bytes]] = []
        self._controls: queue.Queue[internal_pb2.EventControl | None] = queue.Queue()
        self._server = grpc.server(
            futures.ThreadPoolExecutor(16), options=[("grpc.so_reuseport", 0)]
        )
        internal_pb2_grpc.add_FleetServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def Attach(
        self, ups: Iterator[internal_pb2.AttachUp], context: grpc.ServicerContext
    ) -> Iterator[internal_pb2.AttachDown]:
        self.attempts += 1
        down = internal_pb2.AttachDown
        nonce, own = next(ups).greeting.nonce, bytes(range(100, 132))
        proof = router_proof(self.secret, nonce, own)
        yield down(challenge=internal_pb2.Challenge(nonce=own, proof=proof))
        if not matches(replica_proof(self.secret, nonce, own), next(ups).proof.proof):
            yield down(refusal=common_pb2.Status(code=16, message="The proof is wrong."))
            return
        hello = next(ups).hello
        if self.refuse is not None:
            yield down(refusal=self.refuse)
            return
        self.nonces.append((nonce, own))
        self.hellos.append(hello)
        welcome = internal_pb2.Welcome(
            router=self.name, heartbeat_ms=self.heartbeat_ms, lease_ms=5000
        )
        yield down(welcome=welcome)
        for up in ups:
            self.beats.append(up.heartbeat)

    def Events(
        self, batches: Iterator[internal_pb2.EventBatch], context: grpc.ServicerContext
    ) -> Iterator[internal_pb2.EventControl]:
        self.events_streams += 1
        given = dict(context.invocation_metadata())["banyan-session"]
        assert given == session_token(self.secret, "events", *self.nonces[-1])

        def read() -> None:
            try:
                for batch in batches:
                    self.batches.append(batch)
            except grpc.RpcError:
                pass

        if self.read_events:
            threading.Thread(target=read, daemon=True).start()
        while context.is_active():
            try:
                control = self._controls.get(timeout=0.05)
            except queue.Empty:
                continue
            if control is None:
                context.abort(grpc.StatusCode.INTERNAL, "events end here")
            yield control

    def end_events(self) -> None:
        """End the open Events stream with an error; Attach stays."""
        self._controls.put(None)

    def want_snapshot(self) -> None:
        self._controls.put(internal_pb2.EventControl(want_snapshot=True))

    def attached(self) -> internal_pb2.Hello:
        """Wait for the newest hello and a heartbeat."""
        eventually(lambda: self.beats)
        return self.hellos[-1]

    def token(self) -> str:
        return session_token(self.secret, "execute", *self.nonces[-1])

    def execute(self) -> ExecuteStream:
        return ExecuteStream(self.attached(), self.token())


class ExecuteStream:
    """One router's Execute stream to a replica; a thread collects the frames."""

    def __init__(self, hello: internal_pb2.Hello, token: str, read: bool = True) -> None:
        self.hello = hello
        self.root_id = hello.models[0].root_id
        self.frames: list[internal_pb2.Frame] = []
        self.error: grpc.RpcError | None = None
        self.ended = threading.Event()
        self._ups: queue.Queue[internal_pb2.ExecuteUp | None] = queue.Queue()
        self._channel = grpc.insecure_channel(hello.address)
        stub = internal_pb2_grpc.ReplicaStub(self._channel)
        self._call = stub.Execute(iter(self._ups.get, None), metadata=(("banyan-session", token),))
        if read:
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for frame in self._call:
                self.frames.append(frame)
        except grpc.RpcError as error:
            self.error = error
        self.ended.set()

    def send(self, **message: Any) -> None:
        self._ups.put(internal_pb2.ExecuteUp(**message))

    def submit(self, request_id: str, token_ids: list[int], **fields: Any) -> None:
        self.send(submit=self.message(request_id, token_ids, **fields))

    def message(self, request_id: str, token_ids: list[int], **fields: Any) -> internal_pb2.Submit:
        sampling = {"seed": 1, "max_tokens": 8, "ignore_eos": True} | fields.pop("sampling", {})
        if sampling["seed"] is None:
            del sampling["seed"]
        given = {
            "root_id": self.root_id,
            "prompt_tokens": len(token_ids),
            "credit_tokens": 1 << 20,
        } | fields
        return internal_pb2.Submit(
            request_id=request_id,
            token_ids=token_ids,
            sampling=common_pb2.Sampling(**sampling),
            **given,
        )

    def emissions(self, request_id: str) -> list[internal_pb2.Emission]:
        found = []
        for frame in list(self.frames):
            found += [e for e in frame.emissions if e.request_id == request_id]
        return found

    def finished(self, request_id: str) -> list[internal_pb2.Emission]:
        """Wait for the request's last emission; checks that there is just one, at the end."""

        def done() -> bool:
            assert self.error is None, self.error
            return any(emission.last for emission in self.emissions(request_id))

        eventually(done)
        emissions = self.emissions(request_id)
        assert [emission.last for emission in emissions].count(True) == 1
        assert emissions[-1].last
        return emissions

    def tokens(self, request_id: str) -> list[int]:
        """All token ids of a finished request with one choice, positions checked."""
        ids: list[int] = []
        for emission in self.finished(request_id):
            assert not emission.HasField("error"), emission.error.message
            assert not emission.token_ids or emission.position == len(ids)
            ids += emission.token_ids
        return ids

    def cancel(self) -> None:
        self._call.cancel()
        self._channel.close()

    def half_close(self) -> None:
        self._ups.put(None)


def ticket(
    hello: internal_pb2.Hello, token_ids: list[int], secret: bytes = SECRET, **fields: Any
) -> bytes:
    """A ticket as a router would seal it for these tokens."""
    given = {
        "request_id": "direct",
        "replica": hello.replica,
        "epoch": hello.epoch,
        "root_id": hello.models[0].root_id,
        "token_digest": token_digest(tokens_u32le(token_ids), len(token_ids)),
        "seed": 1,
        "prompt_tokens": len(token_ids),
        "expires_unix_ms": time.time_ns() // 1_000_000 + 60_000,
    } | fields
    return seal(secret, internal_pb2.TicketBody(**given).SerializeToString())
