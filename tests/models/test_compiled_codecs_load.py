"""Which codecs the compiled path takes when a replica asks for them, and what it says of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from model_stepper import Stepper, run_chunked
from random_decoders import config_of, random_weights, token_ids

from kernels.codecs.names import CodecName
from kernels.native.pages import unsupported_codec
from seams.errors import ModelLoadError
from worker.config import ReplicaConfig
from worker.models.compiled import CompiledModel
from worker.models.making import compiled_dtype, make_model


def replica(**fields: Any) -> ReplicaConfig:
    given = {"model": "m", "device": "cpu", "threads": 1, **fields}
    return ReplicaConfig(replica="r0", served_name="m", routers=(), secret_file="", **given)


@pytest.mark.parametrize("codec", ["fp8", "turboquant:k8v4", "turboquant:k4v4,boundary=1"])
def test_the_compiled_path_is_chosen(codec: str) -> None:
    """Exactly too, where that is asked for; FP8's scales are fitted by the compiled step itself."""
    config = config_of("llama")
    asked = replica(kv_codec=codec, batch_invariant=True)
    dtype = compiled_dtype(asked, config, torch.bfloat16, torch.device("cpu"))
    assert dtype is torch.bfloat16
    weights = random_weights(config, dtype)
    [first, *rest] = weights.layers
    large = replace(weights, layers=(replace(first, qkv=first.qkv * 400), *rest))
    names = []
    for each in (weights, large):
        model = make_model(asked, config, each, fingerprint="f", context_tokens=64, compiled=True)
        assert isinstance(model, CompiledModel)
        names.append(model.spec.numeric_class)
        assert "-invariant-bf16-kv-" in names[-1]
        ids = token_ids(40, config.vocab_tokens, 7)
        assert run_chunked(Stepper(model, 4), ids, 40).isfinite().all()
    assert (names[0] != names[1]) == codec.startswith(("fp8", "turboquant:k8"))


def test_what_it_lacks_is_one_sentence() -> None:
    config, cpu = config_of("llama"), torch.device("cpu")
    assert unsupported_codec(CodecName("model")) == ""
    asked = replica(kv_codec="oscar", calibration="/no/file")
    assert compiled_dtype(asked, config, torch.bfloat16, cpu) is None, "torch computes"
    with pytest.raises(ModelLoadError, match="The compiled CPU path has no KV codec oscar"):
        compiled_dtype(replace(asked, compute="compiled"), config, torch.bfloat16, cpu)
    exactly = replace(asked, batch_invariant=True)
    for each in (
        exactly,
        replace(exactly, kv_codec="fp8", compute="torch"),
        replace(exactly, kv_codec="fp8", adapters={"a": "/no/folder"}),
    ):
        with pytest.raises(ModelLoadError, match="No batch-invariant path"):
            compiled_dtype(each, config, torch.bfloat16, cpu)
