"""What a FakeModel gives when tokens are dropped: streams computed without pools, tables and moves.
And a rig whose engine prunes."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from engine_rig import BLOCK, Recorder, Rig

from kernels.slots import Longs
from worker.engine.core import EngineCore
from worker.engine.packing import pack
from worker.engine.radix_node import Node
from worker.engine.retention.base import Mask, PageView, Quota, Retained, RetentionPolicy
from worker.engine.retention.policies import REQUESTS, Policies, policy_of
from worker.models.fake import FakeModel, fake_model


@dataclass(frozen=True)
class Scattered:
    """Keeps the newest fourth and, of the rest, tokens all over the place: pages full of holes."""

    quota: Quota
    reads_keys: bool = False
    state_hash: str = "scattered"
    resume: bool = False

    def select(self, view: PageView) -> Mask:
        order = view.positions.astype(np.int64) * 2654435761 % 97
        order[view.positions >= view.computed - view.kept // 4] = 1000
        order[:, : view.fixed] = 10_000
        order = order * 100_000 + view.positions
        kept = np.zeros(order.shape, dtype=np.bool_)
        np.put_along_axis(kept, np.argsort(-order, axis=1)[:, : view.kept], True, axis=1)
        return kept


def no_keys() -> None:
    """The keys of a fake model."""
    raise AssertionError("a fake model has no keys")


class PrunedOracle:
    """One sequence: the KV of every stored token, in the order of its slots, as lists of bytes."""

    def __init__(self, model: FakeModel, policy: RetentionPolicy, prompt_tokens: int) -> None:
        self._model, self._policy = model, policy
        self._kv: list[list[bytes]] = [[] for _ in model.spec.groups]
        self._retained = Retained.of(policy, prompt_tokens)
        self.computed = 0
        self.rounds = 0

    def append(self, token: int) -> None:
        """Compute one more token, after a round if one is due."""
        if len(self._kv[0]) == self._retained.limit:
            self._prune()
        for g, stored in enumerate(self._kv):
            stored.append(self._model._extend(g, b"".join(stored), self.computed, [token]))
        self.computed += 1

    def logits(self) -> np.ndarray:
        """After the last token."""
        seen = b"".join(b"".join(stored) for stored in self._kv)
        return self._model._logits([hashlib.blake2b(seen).digest()])[0].numpy()

    def _prune(self) -> None:
        retained, size = self._retained, self._model.spec.block_tokens
        positions = retained.positions_of(self.computed, len(self._kv[0]))
        view = PageView(
            size,
            retained.fixed,
            retained.kept,
            self.computed,
            positions,
            no_keys,
            no_keys,  # type: ignore[arg-type]
        )
        packing = pack(self._policy.select(view), retained.fixed, size)
        at = [int(page) * size + offset for page in packing.order for offset in range(size)]
        for source, target in zip(packing.sources, packing.targets, strict=True):
            at[target] = int(source)
        at = at[: packing.kept]
        self._kv = [[kv[slot] for slot in at] for kv in self._kv]
        retained.positions = positions[:, at]
        self.rounds += 1


def pruned_continuation(
    model: FakeModel, policy: RetentionPolicy, prompt_tokens: int, ids: Sequence[int], count: int
) -> list[int]:
    """The greedy continuation of `ids`, end tokens ignored."""
    oracle = PrunedOracle(model, policy, prompt_tokens)
    for token in ids:
        oracle.append(token)
    out: list[int] = []
    while len(out) < count:
        out.append(int(oracle.logits().argmax()))
        if len(out) < count:
            oracle.append(out[-1])
    return out


class Mover(Recorder):
    """A Recorder that counts the slots of every round's moves."""

    def __init__(self, model: FakeModel) -> None:
        super().__init__(model)
        self.moves: list[int] = []

    def move_slots(
        self, group: int, sources: Longs, targets: Longs, rows: Longs | None = None
    ) -> None:
        self.moves.append(len(targets))
        super().move_slots(group, sources, targets, rows)


class PrunedRig(Rig):
    """A Rig whose engine has retention policies; outputs are held to the oracle of each."""

    def __init__(
        self, default: str | RetentionPolicy = REQUESTS, shape: str = "full", **config: object
    ) -> None:
        super().__init__(shape, **config)  # type: ignore[arg-type]
        self.model: Mover = Mover(fake_model(shape, context_tokens=2048, block_tokens=BLOCK))
        self.policies = Policies(self.model.spec, default if isinstance(default, str) else REQUESTS)
        if not isinstance(default, str):
            self.policies.default = default
        self.core = EngineCore(self.model, self.config, self.clock, retention=self.policies)

    def assert_exact(self, *names: str) -> None:
        """Greedy outputs so far are what the request's policy gives alone."""
        for name in names or self.requests:
            one = self.requests[name]
            policy = policy_of(one.retention, self.policies)
            for choice in range(one.sampling.n):
                out = self.output(name, choice)
                if policy is None:
                    expected = self.model.oracle(one.token_ids, len(out), ignore_eos=True)
                else:
                    expected = pruned_continuation(
                        self.model, policy, one.prompt_tokens, one.token_ids, len(out)
                    )
                assert out == expected, f"{name}, choice {choice}"

    @property
    def total(self) -> object:
        """What rounds came to."""
        return self.core.load().compacted

    def assert_cache_is_plain(self) -> None:
        """Every cached block holds what its tokens give without any pruning."""
        cache = self.core.memory.cache
        assert cache is not None
        for node in cache._tree.nodes():
            self._check_node(node)

    def _bytes(self, group: int, block: int) -> bytes:
        """A block's positions one after the other, all ranks of each together."""
        ranks = range(self.model.spec.groups[group].ranks)
        parts = [
            np.frombuffer(self.model.read_block(group, block, rank), np.uint8).reshape(BLOCK, -1)
            for rank in ranks
        ]
        return (np.concatenate(parts, axis=1) ^ np.uint8(self.model._mask)).tobytes()

    def _check_node(self, node: Node) -> None:
        tokens = path_tokens(node)
        oracle = self.model._oracle_kv(tokens)
        first = node.start // BLOCK
        for g, (kv, run) in enumerate(zip(oracle, node.blocks, strict=True)):
            width = len(kv) // len(tokens)
            for index, block in enumerate(run, first):
                held = self._bytes(g, block)
                at = index * BLOCK * width
                assert held == bytes(kv[at : at + BLOCK * width]), "not the plain chain's values"
            if node.tail:
                at = node.end // BLOCK * BLOCK * width
                held = self._bytes(g, node.tail[g])
                assert held[: node.end % BLOCK * width] == bytes(kv[at : node.end * width])


def path_tokens(node: Node) -> list[int]:
    """All tokens from the root to a node's end."""
    parts: list[bytes] = []
    above: Node | None = node
    while above is not None:
        parts.append(above.tokens)
        above = above.parent
    return memoryview(b"".join(reversed(parts))).cast("I").tolist()
