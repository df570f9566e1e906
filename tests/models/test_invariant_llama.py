"""LlamaModel through the batch-invariant kernels, in Triton's interpreter: a row's logits are the
same to the bit alone, in a batch, in chunks and behind a cached prefix; and near transformers'.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_writer import write_adapter
from model_stepper import Stepper, run_chunked
from test_llama_against_transformers import make_small
from transformers_yardstick import load, small_prompts

from seams.errors import ModelLoadError
from worker.config import ReplicaConfig
from worker.models import making

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]


def interpret(tmp_path: Path, *given: str) -> dict[str, list[str]]:
    paths = [ROOT, HERE, ROOT / "tests" / "shared"]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "OMP_NUM_THREADS": "1",
        "BANYAN_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    command = [sys.executable, str(HERE / "invariant_decoders.py"), *given]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stderr
    report: dict[str, list[str]] = json.loads(ran.stdout.splitlines()[-1])
    return report


def exact(tmp_path: Path, *given: str) -> None:
    report = interpret(tmp_path, *given)
    assert report and not any(report.values()), report


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [pytest.param("fp32", "llama", marks=pytest.mark.soak), ("fp16", "everything")],
)  # nearly a minute each
def test_a_request_in_any_company(tmp_path: Path, dtype: str, kind: str) -> None:
    exact(tmp_path, "exact", dtype, kind)


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "kind", ["llama", "mqa", "group_3", "qwen2", "qwen3", "mixed_window", "gemma2", "gemma3"]
)
def test_every_kind_in_any_company(tmp_path: Path, dtype: str, kind: str) -> None:
    exact(tmp_path, "exact", dtype, kind)
    exact(tmp_path, "engine", dtype, kind)


def test_over_a_split_of_the_keys(tmp_path: Path) -> None:
    exact(tmp_path, "long", "fp32")


def test_requests_through_an_engine(tmp_path: Path) -> None:
    exact(tmp_path, "engine", "fp16", "llama")


@pytest.mark.parametrize("name", ["qwen2", "gemma3_capped_window"])
def test_logits_are_near_transformers(tmp_path: Path, name: str) -> None:
    make_small(name, tmp_path / name)
    assert interpret(tmp_path, "near", str(tmp_path / name)) == {"near": []}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    make_small("llama", tmp_path / "small")
    return tmp_path / "small"


def asked(**fields: Any) -> ReplicaConfig:
    return ReplicaConfig("r0", "m", "m", (), "", batch_invariant=True, **fields)


def test_which_devices_serve_it(folder: Path, tmp_path: Path) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    with pytest.raises(ModelLoadError, match="torch was asked for"):
        load(folder, compute="torch", batch_invariant=True)
    making.refuse_variant(asked(), "it is a GPU.", gpu)
    with pytest.raises(ModelLoadError, match="it is a CPU"):
        making.refuse_variant(asked(), "it is a CPU.", cpu)
    with pytest.raises(ModelLoadError, match="adapters"):
        making.refuse_variant(asked(adapters=("a=x",)), "it is a GPU.", gpu)
    with pytest.raises(ModelLoadError, match="through transformers"):
        making.refuse_variant(asked(), "it is computed through transformers.")
    adapter = write_adapter(tmp_path / "a", folder, 1)
    with pytest.raises(ModelLoadError, match="No batch-invariant path"):
        load(folder, batch_invariant=True, adapters=(f"a={adapter}",))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_on_a_gpu(folder: Path, dtype: str) -> None:
    model = load(folder, device="cuda", dtype=dtype, batch_invariant=True)
    assert "-invariant-" in model.spec.numeric_class
    stepper = Stepper(model, blocks=40)
    prompt = small_prompts()[2]
    whole = run_chunked(stepper, prompt, len(prompt))
    for chunk in (1, 3, 7, 64):
        assert torch.equal(run_chunked(stepper, prompt, chunk), whole)
    streams = [stepper.add(prompt[:count]) for count in (133, 40, 7, 90)]
    stepper.step([(stream, len(stream.token_ids)) for stream in streams])
    for stream in streams:
        assert torch.equal(torch.stack(stream.logits), whole[: len(stream.token_ids)])
