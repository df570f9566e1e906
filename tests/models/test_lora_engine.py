"""Adapters through the engine: merged-model answers in one batch, and no block ever shared."""

from __future__ import annotations

from pathlib import Path

import pytest
from lora_writer import merged, write_adapter
from transformers_yardstick import load, save_small

from banyan.v1 import common_pb2, internal_pb2
from kvstore.keys import ChainSpec, chain, root
from router.fleet import check_parity
from seams.clock import VirtualClock
from seams.errors import InvalidRequest
from seams.rng import SystemRng
from worker.config import EngineConfig, ReplicaConfig
from worker.engine.core import EngineCore
from worker.engine.messages import CacheOpKind, EngineRequest, RequestUsage
from worker.engine.sampling import SamplingParams
from worker.models.base import Model
from worker.service.convert import submitted
from worker.service.hello import build_hello, served_roots

PROMPT = tuple((7 * i + i * i // 5) % 300 + 3 for i in range(40))  # two blocks and a half
OTHER = tuple((11 * i + 5) % 300 + 3 for i in range(21))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_small(folder, "LlamaConfig", {"eos_token_id": 2})
    return folder


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(folder / "1", base, 1),
        write_adapter(folder / "2", base, 2, rank=7, targets=("q_proj", "v_proj", "down_proj")),
    ]


def adapted(base: Path, adapters: list[Path]) -> Model:
    named = tuple(f"a{i}={folder}" for i, folder in enumerate(adapters, start=1))
    return load(base, compute="torch", adapters=named)


class Engine:
    """One EngineCore with the conservation law checked after every step."""

    def __init__(self, model: Model) -> None:
        limits = EngineConfig(blocks=(80,), poison_freed=True)
        self.core = EngineCore(model, limits, VirtualClock())
        self.tokens: dict[str, list[int]] = {}
        self.usage: dict[str, RequestUsage] = {}
        self.errors: dict[str, Exception] = {}

    def submit(self, name: str, prompt: tuple[int, ...], adapter: int, count: int = 8) -> None:
        sampling = SamplingParams(seed=1, max_tokens=count, ignore_eos=True)
        self.core.submit(
            EngineRequest(name, prompt, len(prompt), sampling=sampling, adapter=adapter)
        )

    def run(self) -> None:
        while self.core.has_work():
            output = self.core.step()
            self.core.check_integrity()
            assert output is not None
            for emission in output.emissions:
                self.tokens.setdefault(emission.request_id, []).extend(emission.token_ids)
                if emission.usage is not None:
                    self.usage[emission.request_id] = emission.usage
                if emission.error is not None:
                    self.errors[emission.request_id] = emission.error

    def answer(self, name: str, prompt: tuple[int, ...], adapter: int) -> tuple[list[int], int]:
        """The tokens of one request, and how many of its prompt's were cached."""
        self.submit(name, prompt, adapter)
        self.run()
        return self.tokens[name], self.usage[name].cached_tokens


def test_a_batch_of_two_adapters_and_none(base: Path, adapters: list[Path], tmp_path: Path) -> None:
    wholes = [base, *(merged(a, base, tmp_path / a.name) for a in adapters)]
    expected = {
        (number, prompt): Engine(load(folder, compute="torch")).answer("x", prompt, 0)[0]
        for number, folder in enumerate(wholes)
        for prompt in (PROMPT, OTHER)
    }
    assert len({tuple(tokens) for tokens in expected.values()}) == 6
    engine = Engine(adapted(base, adapters))
    for number, prompt in expected:
        engine.submit(f"{number} {len(prompt)}", prompt, number)
    engine.run()
    for (number, prompt), tokens in expected.items():
        assert engine.tokens[f"{number} {len(prompt)}"] == tokens


def test_no_hit_ever_crosses_adapters(base: Path, adapters: list[Path]) -> None:
    engine = Engine(adapted(base, adapters))
    first = [engine.answer(f"first {a}", PROMPT, a) for a in (0, 1, 2)]
    assert [cached for _, cached in first] == [0, 0, 0]
    again = [engine.answer(f"again {a}", PROMPT, a) for a in (2, 0, 1)]
    assert [cached for _, cached in again] == [len(PROMPT) - 1] * 3
    assert [tokens for tokens, _ in again] == [first[a][0] for a in (2, 0, 1)]
    assert len({tuple(tokens) for tokens, _ in first}) == 3


def test_the_same_prompt_at_once_is_computed_by_each(base: Path, adapters: list[Path]) -> None:
    """A request may wait for one with its prefix, but not for one of another adapter."""
    engine = Engine(adapted(base, adapters))
    for adapter in (0, 1, 2):
        engine.submit(str(adapter), PROMPT, adapter)
    engine.run()
    assert [engine.usage[str(a)].cached_tokens for a in (0, 1, 2)] == [0, 0, 0]
    assert len({tuple(engine.tokens[str(a)]) for a in (0, 1, 2)}) == 3


def test_published_keys_start_from_the_adapters_root(base: Path, adapters: list[Path]) -> None:
    model = adapted(base, adapters)
    engine = Engine(model)
    for adapter in (0, 1, 2):
        engine.answer(str(adapter), PROMPT, adapter)
    ops = [op for op in engine.core.snapshot() if op.kind is CacheOpKind.STORED]
    stored = {key for op in ops for key in op.keys}
    spec = model.spec
    fingerprints = ("", *(a.fingerprint for a in spec.adapters))
    for fingerprint in fingerprints:
        start = root(spec.fingerprint, fingerprint, spec.block_tokens)
        assert set(chain(ChainSpec(start, spec.block_tokens), PROMPT)) <= stored
    assert len(fingerprints) == 3


def test_an_adapter_that_is_not_there(base: Path, adapters: list[Path]) -> None:
    engine = Engine(adapted(base, adapters))
    engine.submit("a", PROMPT, 3)
    engine.run()
    assert isinstance(engine.errors["a"], InvalidRequest)


def test_the_hello_names_every_adapter_and_its_root(base: Path, adapters: list[Path]) -> None:
    """What a router accepts, and how a request that names such a root reaches the engine."""
    spec = adapted(base, adapters).spec
    served = served_roots(spec, 0)
    hello = build_hello(
        ReplicaConfig("r0", str(base), "model", (), ""),
        spec,
        served,
        (80,),
        {},
        epoch=1,
        address="127.0.0.1:1",
        priors=internal_pb2.Priors(),
        rng=SystemRng(),
    )
    check_parity(hello)
    assert [m.name for m in hello.models] == ["model", "model:a1", "model:a2"]
    assert [m.adapter for m in hello.models] == ["", "a1", "a2"]
    assert len({m.root_id for m in hello.models}) == 3
    roots = {one.root_id: one for one in served}
    for number, model in enumerate(hello.models):
        submit = internal_pb2.Submit(
            request_id="x",
            root_id=model.root_id,
            token_ids=PROMPT,
            prompt_tokens=len(PROMPT),
            sampling=common_pb2.Sampling(seed=1, max_tokens=4),
        )
        assert submitted(submit, "e", roots, 0.0).adapter == number


def test_a_reloaded_adapter_under_its_old_name_is_another(base: Path, tmp_path: Path) -> None:
    """The name is not part of the key: other weights under it never meet the old blocks."""
    before = adapted(base, [write_adapter(tmp_path / "a", base, 1)]).spec
    after = adapted(base, [write_adapter(tmp_path / "a", base, 2)]).spec
    one, two = served_roots(before, 0), served_roots(after, 0)
    assert one[0].root_id == two[0].root_id and one[1].root_id != two[1].root_id
