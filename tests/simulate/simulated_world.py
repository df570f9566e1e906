"""Small fleets and workloads for the simulator's tests."""

from __future__ import annotations

from collections.abc import Sequence

from banyan.v1 import internal_pb2
from router.placement import PlaceRequest
from seams.clock import VirtualClock
from seams.rng import SeededRng
from simulate.cluster import Setup
from simulate.engine import Shape
from simulate.policies.base import Place
from simulate.policies.seen import SeenPolicy
from simulate.replica import MODEL, Replica
from simulate.workload import Grain, SimRequest, Workload, chats, request_of

GRAIN = Grain(64, 16)


def small_chats(seed: int = 1, *, users: int = 40, rate: float = 4.0) -> Workload:
    return chats(
        users, 4, 3, seed, grain=GRAIN, rate=rate, system_tokens=1024, turn_tokens=256,
        output_tokens=40, think_s=5.0,
    )  # fmt: skip


def small_setup(replicas: int = 4, blocks: int = 160, **options: object) -> Setup:
    host = options.pop("host_blocks", 0)
    assert isinstance(host, int)
    shape = Shape(blocks, GRAIN, host_blocks=host, step_tokens_max=256)
    return Setup(shape, replicas, **options)  # type: ignore[arg-type]


def one_request(
    number: int, prompt: Sequence[int], *, output_tokens: int = 10, at_s: float = 0.0
) -> SimRequest:
    return request_of(GRAIN, number, at_s, prompt, len(prompt) * GRAIN.cell_tokens, output_tokens)


def hello_of(name: str) -> internal_pb2.Hello:
    return Replica(name, 1, Shape(100, GRAIN), 1).hello()


def attached(policy: SeenPolicy, *names: str) -> SeenPolicy:
    for name in names:
        policy.attach(hello_of(name))
    return policy


def place(seed: int = 5) -> Place:
    return Place(VirtualClock(), SeededRng(seed))


def asked(number: int, cells: Sequence[int]) -> PlaceRequest:
    request = one_request(number, cells)
    return PlaceRequest(
        request_id=str(number), model=MODEL, root_id=GRAIN.root, tokens=request.prompt_tokens,
        keys=request.keys, max_tokens=64,
    )  # fmt: skip


def stored(name: str, seq: int, cells: Sequence[int]) -> internal_pb2.EventBatch:
    op = internal_pb2.BlockOp(
        kind=internal_pb2.BlockOp.KIND_STORED, keys=b"".join(one_request(0, cells).keys)
    )
    return internal_pb2.EventBatch(
        replica=name, epoch=1, seq=seq, ops=[op], snapshot=seq == 0, snapshot_last=seq == 0
    )
