"""Models out of GGUF files: configurations, undone conversions, real answers, hostile files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf_writer import quantise_q4_k, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from model_stepper import Stepper, run_chunked
from safetensors.torch import load_file
from test_checkpoint import DOCUMENT, tensors
from transformers_yardstick import load, save_small

from seams.errors import ModelLoadError
from worker.models.config import read_config
from worker.models.opening import open_model
from worker.models.rope import RopeConfig, inverse_frequencies

TEXT = (
    "A banyan is a fig that begins its life on another tree. Its seeds are spread by birds, and a "
    "seedling sends its roots down towards the ground. Paris is the capital of France, Rome is the "
    "capital of Italy, and the capital of Germany is"
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_model: Path) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_grouped": ("LlamaConfig", {"num_key_value_heads": 1, "attention_bias": False}),
    "qwen2": ("Qwen2Config", {"max_window_layers": 4}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "phi3": ("Phi3Config", {}),
    "gemma": ("GemmaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2Config",
        {"sliding_window": 21, "head_dim": 32, "query_pre_attn_scalar": 32},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 21, "head_dim": 32, "query_pre_attn_scalar": 32},
    ),
}
THEIRS = ("llama", "llama_grouped", "qwen2", "gemma2", "gemma3")  # what transformers reads


def document_of(folder: Path) -> dict[str, Any]:
    """config.json with RoPE's base as files of before transformers 5 have it."""
    document = json.loads((folder / "config.json").read_text())
    rope = document.get("rope_parameters") or {}
    theta = rope.get("full_attention", rope).get("rope_theta")
    return {**document, "rope_theta": theta, "eos_token_id": 2}


def pair(name: str, tmp_path: Path) -> tuple[Path, Path]:
    """A folder of safetensors and a GGUF file of the same random model."""
    config_class, changes = FAMILIES[name]
    save_small(tmp_path / "hf", config_class, {"eos_token_id": 2, **changes})
    document = document_of(tmp_path / "hf")
    held = load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "gguf").mkdir()
    path = tmp_path / "gguf" / "model.gguf"
    write_gguf(path, document, held)
    return tmp_path / "hf", path


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_is_the_model_it_was_made_from(name: str, tmp_path: Path) -> None:
    folder, path = pair(name, tmp_path)
    config, source = open_model(path)
    assert config == read_config(folder)
    held = load_file(folder / "model.safetensors")
    assert source.names == sorted(held)
    for key, tensor in held.items():
        found = source.tensor(key)
        offset = 1e-6 if config.norm_offset and key.endswith("norm.weight") else 0  # (w + 1) - 1
        torch.testing.assert_close(found, tensor.float(), rtol=0, atol=offset, msg=key)
    prompt = [3, 5, 8, 13, 21, 34, 55, 89, 144] * 4
    ours = run_chunked(Stepper(load(path), 20), prompt, 16)
    same = run_chunked(Stepper(load(folder), 20), prompt, 16)
    torch.testing.assert_close(ours, same, rtol=0, atol=1e-5 if config.norm_offset else 0)


@pytest.mark.parametrize("name", THEIRS)
def test_transformers_reads_the_same_tensors(name: str, tmp_path: Path) -> None:
    """The conversion of the test is not of our own making only."""
    from transformers import AutoModelForCausalLM, GgufConfig

    _, path = pair(name, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).state_dict()
    _, source = open_model(path)
    for key in source.names:
        torch.testing.assert_close(source.tensor(key), theirs[key], rtol=0, atol=0, msg=key)


def tiny(path: Path, metadata: Callable[[Any], None] = lambda w: None, **changes: Any) -> Path:
    extra = changes.pop("extra", None)
    document = {**DOCUMENT, "rope_theta": 1e4, "eos_token_id": 3, "rms_norm_eps": 1e-5, **changes}
    write_gguf(path, document, tensors(torch.float32), metadata=metadata, extra=extra)
    return path


def test_end_tokens_and_epsilon_are_as_their_author_wrote_them(tmp_path: Path) -> None:
    path = tiny(tmp_path / "a.gguf", lambda w: w.add_eot_token_id(7))
    config, source = open_model(path)
    assert config.eos_token_ids == (3, 7) and config.norm_eps == 1e-5
    assert source.dtype is torch.float32


def test_the_rope_of_llama_3_is_found_again(tmp_path: Path) -> None:
    given = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    given |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    save_small(tmp_path, "LlamaConfig", {"head_dim": 64, "rope_parameters": given})
    config, document = read_config(tmp_path), document_of(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    plain = inverse_frequencies(RopeConfig(5e5), 64)
    factors = (plain / inverse_frequencies(config.rope, 64)).numpy()
    assert len(set(factors.round(3).tolist())) > 3
    path = tmp_path / "a.gguf"
    write_gguf(path, document, held, extra={"rope_freqs.weight": factors})
    found, source = open_model(path)
    assert found.rope == config.rope and source.names == sorted(held)
    write_gguf(path, document, held, extra={"rope_freqs.weight": factors[::-1].copy()})
    with pytest.raises(ModelLoadError, match="rope_freqs"):
        open_model(path)


REFUSED: list[tuple[Callable[[Any], None], str]] = [
    (lambda w: w.add_uint32("qwen3.expert_count", 8), "mixtures"),
    (lambda w: w.add_uint16("split.count", 2), "one part of several"),
    (lambda w: w.add_string("qwen3.rope.scaling.type", "yarn"), "yarn"),
    (lambda w: w.add_uint32("qwen3.rope.dimension_count", 2), r"rope\.dimension_count"),
    (lambda w: w.add_uint32("qwen3.attention.value_length", 2), r"attention\.value_length"),
]


@pytest.mark.parametrize(("metadata", "named"), REFUSED)
def test_what_cannot_be_served_is_refused(
    metadata: Callable[[Any], None], named: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=named):
        open_model(tiny(tmp_path / "a.gguf", metadata))


def test_foreign_architectures_types_and_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match="'mamba' is not supported"):
        open_model(path)
    tiny(path, extra={"v.patch.weight": np.zeros((4, 4), dtype=np.float32)})
    with pytest.raises(ModelLoadError, match=r"v\.patch\.weight has no place"):
        load(path)
    tiny(path, extra={"odd.weight": np.zeros((4, 4), dtype=np.int8)})
    with pytest.raises(ModelLoadError, match="type number 24 are not supported"):
        load(path)


def test_a_folder_with_one_file_or_several(tmp_path: Path) -> None:
    tiny(tmp_path / "a.gguf")
    by_folder, by_file = load(tmp_path), load(tmp_path / "a.gguf")
    assert by_folder.spec == by_file.spec
    tiny(tmp_path / "b.gguf")
    with pytest.raises(ModelLoadError, match="several GGUF files"):
        load(tmp_path)
    assert load(tmp_path / "b.gguf").spec == by_file.spec
    with pytest.raises(ModelLoadError, match="no such model"):
        load(tmp_path / "c.gguf")


def test_identity_follows_the_stored_bytes(tmp_path: Path) -> None:
    one = load(tiny(tmp_path / "a.gguf")).spec.fingerprint
    assert load(tiny(tmp_path / "b.gguf")).spec.fingerprint == one
    document = {**DOCUMENT, "rope_theta": 1e4, "rms_norm_eps": 1e-5}
    held = tensors(torch.float32)
    held["lm_head.weight"][3, 3] += 1
    write_gguf(tmp_path / "c.gguf", document, held)
    assert load(tmp_path / "c.gguf").spec.fingerprint != one


# --- the real model ------------------------------------------------------------------------------

EXACT_ENOUGH = 5e-3  # for the same answer to a simple question
KINDS: dict[str, tuple[Kind, float]] = {  # its type, and what the mean KL may be, in nats
    "bf16": (Kind.BF16, 0.0),
    "q8_0": (Kind.Q8_0, EXACT_ENOUGH),
    "q4_0": (Kind.Q4_0, 1.0),
    "q4_1": (Kind.Q4_1, EXACT_ENOUGH),
    "q4_k": (Kind.Q4_K, 0.5),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_real_model_in_a_file(name: str, demo_model: Path, tmp_path: Path) -> None:
    """Rows that are no multiple of 256 cannot be Q4_K: those are Q4_0. The demo model once was
    Q4_1, so that costs it nothing.
    """
    from tokenizers import Tokenizer

    kind, bound = KINDS[name]

    def chosen(stored: str, values: np.ndarray) -> Kind:
        if values.ndim == 1:
            return Kind.F32
        if kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K) and stored.startswith("token_embd"):
            return Kind.Q8_0
        return Kind.Q4_0 if kind is Kind.Q4_K and values.shape[1] % 256 else kind

    held = load_file(demo_model / "model.safetensors")
    path = tmp_path / "model.gguf"
    write_gguf(path, document_of(demo_model), held, chosen, {Kind.Q4_K: quantise_q4_k})
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    prompt = tokenizer.encode(TEXT).ids
    quantised, dense = Stepper(load(path), 16), Stepper(load(demo_model), 16)
    ours = run_chunked(quantised, prompt, 64).log_softmax(-1)
    theirs = run_chunked(dense, prompt, 64).log_softmax(-1)
    kl = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    size = path.stat().st_size / 1e6
    print(f"{name}: {size:.0f} MB, mean KL to the dense model {kl:.1e} nats")
    agreed = float((ours.argmax(-1) == theirs.argmax(-1)).float().mean())
    print(f"{agreed:.0%} of the likeliest tokens are the dense model's")
    assert math.isfinite(kl) and kl <= bound and agreed >= 0.5
    if name == "bf16":
        assert torch.equal(ours, theirs)
    stream = quantised.add(prompt)
    quantised.step([(stream, len(prompt))])
    for _ in range(6):
        stream.token_ids.append(int(stream.logits[-1].argmax()))
        quantised.step([(stream, 1)])
    text = tokenizer.decode(stream.token_ids)
    print(text)
    assert "Berlin" in text or bound > EXACT_ENOUGH


# --- hostile files -------------------------------------------------------------------------------


def read_all(path: Path) -> None:
    """Open and read every tensor as a load would."""
    _, source = open_model(path)
    with source:
        for name in source.names:
            source.tensor(name)


def refused(path: Path, named: str) -> None:
    with pytest.raises(ModelLoadError, match=named) as caught:
        read_all(path)
    assert caught.value.message.endswith(".") and "\n" not in caught.value.message


def test_truncated_at_every_length(tmp_path: Path) -> None:
    whole = tiny(tmp_path / "a.gguf").read_bytes()
    path = tmp_path / "b.gguf"
    for length in [*range(0, len(whole) - 32, 97), 1, 3, 4, 8, 23]:
        path.write_bytes(whole[:length])
        refused(path, "not a|damaged or incomplete")


@pytest.mark.parametrize("at", [8, 16])
def test_absurd_counts(at: int, tmp_path: Path) -> None:
    data = bytearray(tiny(tmp_path / "a.gguf").read_bytes())
    for count in (1 << 63, 1 << 40, 1 << 17, 60_000):
        data[at : at + 8] = count.to_bytes(8, "little")
        (tmp_path / "a.gguf").write_bytes(data)
        refused(tmp_path / "a.gguf", "damaged|lacks")


def test_other_versions_and_files(tmp_path: Path) -> None:
    data = bytearray(tiny(tmp_path / "a.gguf").read_bytes())
    data[4] = 9
    (tmp_path / "a.gguf").write_bytes(data)
    refused(tmp_path / "a.gguf", "version 9 of a.gguf")
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    refused(tmp_path / "a.gguf", "not a GGUF file")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("fuzz")
    return folder / "b.gguf", tiny(folder / "a.gguf").read_bytes()


EDIT = st.tuples(st.floats(0, 1), st.one_of(st.binary(min_size=1, max_size=9), st.integers(1, 40)))


@settings(max_examples=400)
@given(edits=st.lists(EDIT, min_size=1, max_size=4), head=st.booleans())
def test_any_damage_is_one_sentence(
    whole: tuple[Path, bytes], edits: list[tuple[float, bytes | int]], head: bool
) -> None:
    """Bytes overwritten or cut out anywhere, or in the first part, where all lengths are."""
    path, data = whole[0], bytearray(whole[1])
    for where, edit in edits:
        at = int(where * (min(len(data), 3000) if head else len(data)))
        if isinstance(edit, int):
            del data[at : at + edit]
        else:
            data[at : at + len(edit)] = edit
    path.write_bytes(data)
    message = ""
    try:
        read_all(path)
    except ModelLoadError as error:
        message = error.message
    assert len(message) < 600 and "\n" not in message and message[-1:] in ("", ".")
