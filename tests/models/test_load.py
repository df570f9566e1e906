"""Loading a replica's model and sizing its pools: every refusal is one sentence, none a crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_stepper import Stepper
from test_checkpoint import DOCUMENT, tensors

from kvstore.groups import GroupKind, KVGroup, Representation
from seams.errors import ModelLoadError, OutOfBlocks
from worker.config import ReplicaConfig
from worker.engine.plan import BlockCopy, StepPlan
from worker.models import load as load_module
from worker.models import memory
from worker.models.base import Model, ModelSpec
from worker.models.load import load_model, plan_blocks
from worker.models.weights import SINGLE


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({**DOCUMENT, "eos_token_id": 3}))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    save_file(tensors(), made / SINGLE)
    return made


def config(model: Path | str, **fields: Any) -> ReplicaConfig:
    return ReplicaConfig("r0", str(model), "served", (), "", **{"device": "cpu", **fields})


def load(model: Path | str, **fields: Any) -> Model:
    return load_model(config(model, **fields))


def test_spec_of_a_loaded_model(folder: Path) -> None:
    spec = load(folder).spec
    assert (spec.name, spec.vocab_tokens, spec.context_tokens) == ("served", 24, 64)
    assert (spec.eos_token_ids, spec.block_tokens) == ((3, 7), 16)
    # on a CPU auto is fp32, whatever the checkpoint: cached text must be the computed one
    assert spec.representation == Representation(dtype="fp32")
    (group,) = spec.groups
    assert group == KVGroup(0, GroupKind.FULL, (0, 1), 2 * 2 * 1 * 16 * 4 * 4)
    assert spec.numeric_class.startswith("cpu-") and spec.numeric_class.endswith("-fp32")


def test_settings_reach_the_model(folder: Path) -> None:
    plain = load(folder).spec
    spec = load(folder, dtype="bf16", context_tokens=40, block_tokens=8).spec
    assert (spec.context_tokens, spec.block_tokens) == (40, 8)
    assert spec.groups[0].block_bytes * 4 == plain.groups[0].block_bytes
    assert spec.representation.dtype == "bf16" and spec.numeric_class != plain.numeric_class
    assert spec.fingerprint == plain.fingerprint  # dtype is representation, not identity


def test_threads_are_set(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        load(folder, threads=2)
        assert torch.get_num_threads() == 2
        load(folder)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_progress_runs_once_from_start_to_end(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    for hashed in (True, False):
        told.clear()
        load_model(config(folder), lambda *step: told.append(step))
        done = [d for d, _ in told]
        assert done == sorted(done) and len({total for _, total in told}) == 1
        assert (done[0] < told[0][1] / 2) is hashed  # the second time the hash is remembered
        assert told[-1][1] * 0.5 < done[-1] <= told[-1][1]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"device": "tpu"}, "auto, cpu or cuda"),
        ({"dtype": "int8"}, "bf16, fp16 or fp32"),
        ({"context_tokens": 65}, "context of 65"),
        ({"context_tokens": -1}, "context of -1"),
    ],
)
def test_bad_settings_are_refused(folder: Path, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        load(folder, **fields)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_where_there_is_none(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="no CUDA device"):
        load(folder, device="cuda")
    assert load(folder, device="auto").spec.numeric_class.startswith("cpu")


def test_missing_folder_and_files(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such model folder"):
        load(folder / "none")
    (folder / SINGLE).unlink()
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no readable config\.json"):
        load(folder)


def test_fake_models_come_by_their_shape() -> None:
    model = load("fake:window", context_tokens=512)
    assert model.spec.numeric_class == "fake" and len(model.spec.groups) == 2
    assert (model.spec.name, model.spec.context_tokens) == ("served", 512)
    blocks = plan_blocks(config("fake:window"), model.spec)
    assert len(blocks) == 2 and min(blocks) > 0
    with pytest.raises(ModelLoadError, match="fake"):
        load("fake:nonsense")


def test_blocks_are_raw_bytes_that_come_back(folder: Path) -> None:
    model = load(folder)
    model.allocate((4,))
    size = model.spec.groups[0].block_bytes
    data = bytes(i * 7 % 256 for i in range(size))
    model.write_block(0, 2, data)
    assert model.read_block(0, 2) == data
    assert model.read_block(0, 1) == model.read_block(0, 3) == bytes(size)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_poison_is_nan_in_every_dtype(folder: Path, dtype: str) -> None:
    model = load(folder, dtype=dtype)
    model.allocate((4,))
    model.poison(0, [1, 3])
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for block, poisoned in ((0, False), (1, True), (2, False), (3, True)):
        values = torch.frombuffer(bytearray(model.read_block(0, block)), dtype=torch_dtype)
        assert bool(values.isnan().all()) is poisoned
    model.poison(0, [])


def test_moved_blocks_serve_as_a_prefix_elsewhere(folder: Path) -> None:
    """Bytes read from one model and written into another's pool are that prefix there."""
    token_ids = [t % 24 for t in range(5, 45)]
    source, target = Stepper(load(folder), 4), Stepper(load(folder), 8, seed=3)
    whole = source.add(token_ids)
    source.step([(whole, 40)])
    moved = target.add(token_ids)
    moved.tables = [[5, 2]]
    for old, new in zip(whole.tables[0], moved.tables[0], strict=False):
        target.model.write_block(0, new, source.model.read_block(0, old))
    target.take(0, [5, 2])
    moved.computed = 32
    target.step([(moved, 8)])
    assert torch.allclose(torch.stack(moved.logits), torch.stack(whole.logits[32:]), atol=0.05)
    assert not torch.stack(moved.logits).isnan().any()


def test_copies_run_before_the_step_in_order(folder: Path) -> None:
    model = load(folder)
    model.allocate((4,))
    size = model.spec.groups[0].block_bytes
    model.write_block(0, 0, bytes([1]) * size)
    copies = [BlockCopy(0, 0, 1, 16), BlockCopy(0, 1, 2, 16)]
    plan = StepPlan.of_lists(1, [3], [0], [0, 1], [1], [[[0]]], [[0]], copies)
    logits = model.execute(plan)
    assert logits.shape == (0, 24)  # nothing to sample: no logits
    assert model.read_block(0, 2) == model.read_block(0, 1) == bytes([1]) * size
    assert model.read_block(0, 0) != bytes([1]) * size


def test_no_memory_for_the_pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder)
    size = model.spec.groups[0].block_bytes
    monkeypatch.setattr("worker.models.pools.available_bytes", lambda device: 2 * size)
    with pytest.raises(OutOfBlocks, match=r"no memory left for [0-9.]+ GiB"):
        model.allocate((3,))
    monkeypatch.setattr("worker.models.pools.available_bytes", lambda device: 1 << 62)
    with pytest.raises(OutOfBlocks, match="no memory left"):
        model.allocate((1 << 50,))
    model.allocate((2,))  # a refusal leaves the model as it was
    assert model.read_block(0, 1) == bytes(size)


def spec_of(*groups: KVGroup) -> ModelSpec:
    return ModelSpec("m", "f", 10, 64, (), 16, groups, Representation("bf16"), "c")


FULL = KVGroup(0, GroupKind.FULL, (0,), 1 << 20)
WINDOW = KVGroup(1, GroupKind.WINDOW, (1,), 3 << 20, window_tokens=64)


def test_pool_gib_is_filled_but_not_exceeded() -> None:
    spec = spec_of(FULL)
    assert plan_blocks(config("x", pool_gib=0.5), spec) == (512,)
    assert plan_blocks(config("x", pool_gib=1 / 1024), spec) == (1,)


@given(st.integers(4, 1 << 34), st.integers(1, 64))
def test_groups_share_the_pool(pool: int, running: int) -> None:
    spec = spec_of(FULL, WINDOW)
    asked = config("x", pool_gib=pool / 2**30, running_max=running, step_tokens_max=32)
    useful = 2 * (running * 5 + 2)
    try:
        full, window = plan_blocks(asked, spec)
    except OutOfBlocks:
        assert pool < (4 << 20)
        return
    used = full * FULL.block_bytes + window * WINDOW.block_bytes
    assert used <= pool
    assert window == min(full, useful)
    assert used + FULL.block_bytes + WINDOW.block_bytes > pool


def test_not_even_one_block() -> None:
    with pytest.raises(OutOfBlocks, match=r"needs 4\.00 MiB and the pool has 3\.00 MiB"):
        plan_blocks(config("x", pool_gib=3 / 1024), spec_of(FULL, WINDOW))


def test_default_pool_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, blocks in ((64 << 30, 1024), (1 << 30, 512), (2 << 20, 1)):
        monkeypatch.setattr(load_module, "available_bytes", lambda device, a=available: a)
        assert plan_blocks(config("x"), spec_of(FULL)) == (blocks,)


def test_memory_limits_of_control_groups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    inner = tmp_path / "pod" / "container"
    inner.mkdir(parents=True)
    own = tmp_path / "self"
    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory, "CGROUP_OF_SELF", own)
    machine = memory.available_bytes(device)
    assert machine > 1 << 20
    own.write_text("1:cpu:/old\n0::/pod/container\n")

    def limit(level: Path, limit: str, used: int, droppable: int) -> None:
        (level / "memory.max").write_text(f"{limit}\n")
        (level / "memory.current").write_text(f"{used}\n")
        (level / "memory.stat").write_text(f"anon 5\ninactive_file {droppable}\n")

    limit(inner, "max", 10, 0)
    assert memory.available_bytes(device) > 1 << 20
    limit(inner.parent, "1000", 700, 200)
    assert memory.available_bytes(device) == 500
    limit(inner, "300", 500, 0)
    assert memory.available_bytes(device) == 0
    (inner / "memory.stat").write_text("torn")
    assert memory.available_bytes(device) == 500


PROBE = """
import json, sys
from worker.config import ReplicaConfig
from worker.engine.plan import SampleRow, StepPlan
from worker.engine.sampler import sample
from worker.engine.sampling import SamplingParams
from worker.models.load import load_model, plan_blocks
config = ReplicaConfig("r0", sys.argv[1], "served", (), "", device="cpu", pool_gib=0.001)
model = load_model(config)
model.allocate(plan_blocks(config, model.spec))
row = SampleRow(2, 7, 0, 0, SamplingParams(seed=1, max_tokens=1))
plan = StepPlan.of_lists(1, [1, 2, 3], [0, 1, 2], [0, 3], [3], [[[0]]], [[0, 1, 2]], [], [row])
drawn = sample(model.execute(plan), plan.samples, model.spec.eos_token_ids)
print(json.dumps([[s.sequence, s.token_id] for s in drawn]))
foreign = {"transformers", "huggingface_hub", "ray", "grpc", "router", "banyan"}
print(json.dumps(sorted(foreign & set(sys.modules))))
"""


def test_a_replica_never_loads_transformers(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    drawn, foreign = (json.loads(line) for line in done.stdout.splitlines())
    assert drawn[0][0] == 7 and 0 <= drawn[0][1] < 24
    assert foreign == []
