"""LoRA adapters in the model: as the merged weights, several in one batch, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_writer import TARGETS, merged, write_adapter
from model_stepper import Stepper, run_chunked
from safetensors.torch import load_file, save_file
from transformers_yardstick import load, save_small

from seams.errors import ModelLoadError

PROMPTS = [[3, 5, 8, 13, 21, 34, 55, 89, 144] * 4, [7, 11, 18, 29, 47, 76, 123] * 3, [200, 100, 50]]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "phi3": ("Phi3Config", {}),
    "gemma2": ("Gemma2Config", {"sliding_window": 21, "head_dim": 32}),
}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANYAN_HOME", str(tmp_path / "home"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_small(folder, "LlamaConfig", {"eos_token_id": 2})
    return folder


def with_adapters(base: Path, *folders: Path, **fields: Any) -> Stepper:
    named = tuple(f"a{number}={folder}" for number, folder in enumerate(folders, start=1))
    return Stepper(load(base, compute="torch", adapters=named, **fields), 60)


def alone(stepper: Stepper, prompt: list[int], adapter: int) -> torch.Tensor:
    stream = stepper.add(prompt, adapter)
    for _ in range(2):
        stepper.step([(stream, len(prompt) // 2)])
    if stream.computed < len(prompt):
        stepper.step([(stream, 1)])
    stepper.remove(stream)
    return torch.stack(stream.logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stabilised", [False, True])
def test_an_adapter_is_the_merged_model(family: str, stabilised: bool, tmp_path: Path) -> None:
    config_class, changes = FAMILIES[family]
    base = tmp_path / "base"
    save_small(base, config_class, {"eos_token_id": 2, **changes})
    targets = (*TARGETS, "qkv_proj", "gate_up_proj")
    adapter = write_adapter(tmp_path / "a", base, 1, targets=targets, use_rslora=stabilised)
    whole = Stepper(load(merged(adapter, base, tmp_path / "m"), compute="torch"), 60)
    stepper = with_adapters(base, adapter)
    for prompt in PROMPTS:
        ours, theirs = alone(stepper, prompt, 1), run_chunked(whole, prompt, 64)
        plain = alone(stepper, prompt, 0)
        found, moved = float((ours - theirs).abs().max()), float((ours - plain).abs().max())
        print(f"{family}: {found:.1e} from the merged model, {moved:.1e} from the base")
        assert found < 1e-3 * max(1.0, float(theirs.abs().max())) and moved > 50 * found


def test_the_real_model_with_an_adapter(demo_model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", demo_model, 1, rank=8)
    whole = Stepper(load(merged(adapter, demo_model, tmp_path / "m"), compute="torch"), 60)
    stepper = with_adapters(demo_model, adapter)
    ours, theirs = alone(stepper, PROMPTS[0], 1), run_chunked(whole, PROMPTS[0], 64)
    moved = float((ours - alone(stepper, PROMPTS[0], 0)).abs().max())
    found = float((ours - theirs).abs().max())
    print(f"{found:.1e} from the merged model, {moved:.1e} from the base")
    assert found < 2e-3 and moved > 0.1


def test_two_adapters_and_none_in_one_batch(base: Path, tmp_path: Path) -> None:
    one = write_adapter(tmp_path / "1", base, 1)
    two = write_adapter(tmp_path / "2", base, 2, rank=7, targets=("q_proj", "down_proj"))
    stepper = with_adapters(base, one, two)
    expected = {(i, a): alone(stepper, p, a) for i, p in enumerate(PROMPTS) for a in (0, 1, 2)}
    streams = {(i, a): stepper.add(PROMPTS[i], a) for i, a in expected}
    for count in (2, 1, 18, 15):  # prefill and decode side by side
        work = [(s, min(count, len(s.token_ids) - s.computed)) for s in streams.values()]
        stepper.step([(s, n) for s, n in work if n])
    for key, stream in streams.items():
        assert stream.computed == len(stream.token_ids)
        torch.testing.assert_close(
            torch.stack(stream.logits), expected[key], rtol=0, atol=1e-4, msg=str(key)
        )
    for prompt in range(len(PROMPTS)):
        for a, b in ((0, 1), (0, 2), (1, 2)):
            assert float((expected[prompt, a] - expected[prompt, b]).abs().max()) > 0.01


def test_the_base_rows_of_a_mixed_batch_do_not_move_a_bit(base: Path, tmp_path: Path) -> None:
    stepper = with_adapters(base, write_adapter(tmp_path / "1", base, 1))
    plain, mixed = stepper.add(PROMPTS[0]), stepper.add(PROMPTS[0])
    other, further = stepper.add(PROMPTS[1]), stepper.add(PROMPTS[1], 1)
    stepper.step([(plain, 36), (other, 21)])
    stepper.step([(mixed, 36), (further, 21)])
    assert torch.equal(torch.stack(plain.logits), torch.stack(mixed.logits))


def test_identity_is_weights_and_scale_not_the_name(base: Path, tmp_path: Path) -> None:
    folders = [
        write_adapter(tmp_path / "1", base, 1),
        write_adapter(tmp_path / "2", base, 1),
        write_adapter(tmp_path / "3", base, 1, alpha=17),
        write_adapter(tmp_path / "4", base, 1, use_rslora=True),
        write_adapter(tmp_path / "5", base, 2),
    ]
    spec = with_adapters(base, *folders).model.spec
    first, same, *others = (a.fingerprint for a in spec.adapters)
    assert [a.name for a in spec.adapters] == ["a1", "a2", "a3", "a4", "a5"]
    assert len(first) == 64 and first == same
    assert len({first, *others}) == 4
    assert spec.fingerprint == load(base, compute="torch").spec.fingerprint


def test_the_compiled_path_leaves_adapters_to_torch(base: Path, tmp_path: Path) -> None:
    named = (f"a={write_adapter(tmp_path / '1', base, 1)}",)
    assert "-torch" in load(base, adapters=named).spec.numeric_class
    with pytest.raises(ModelLoadError, match="computes no adapters"):
        load(base, compute="compiled", adapters=named)


def refused(base: Path, named: str, *given: str) -> None:
    with pytest.raises(ModelLoadError, match=named) as caught:
        load(base, compute="torch", adapters=given)
    assert caught.value.message.endswith(".") and "\n" not in caught.value.message


@pytest.mark.parametrize("given", ["a", "=x", "a=", "a b=x", "../a=x", "a/b=x", "a:b=x"])
def test_adapters_are_given_as_name_and_folder(given: str, base: Path) -> None:
    refused(base, "NAME=FOLDER", given)


def test_folders_that_are_no_adapters(base: Path, tmp_path: Path) -> None:
    refused(base, "lacks adapter_config.json", f"a={tmp_path}")
    folder = write_adapter(tmp_path / "1", base, 1)
    refused(base, "Two adapters are named a", f"a={folder}", f"a={folder}")
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(base, "damaged", f"a={folder}")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
        ({"lora_alpha": "x"}, "lora_alpha"),
    ],
)
def test_kinds_that_are_not_served(
    fields: dict[str, Any], named: str, base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "1", base, 1)
    document = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**document, **fields}))
    refused(base, named, f"a={folder}")


KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({f"{KEY}B.weight": None}, "lacks one half"),
        ({f"{KEY}A.weight": torch.ones(4, 65)}, "does not fit"),
        ({f"{KEY}B.weight": torch.ones(64, 5)}, "does not fit"),
        ({f"{KEY}B.weight": torch.full((64, 4), torch.nan)}, "not finite"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, "has no place"),
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 64)}, "9"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(
    changes: dict[str, torch.Tensor | None], named: str, base: Path, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "1", base, 1)
    held: dict[str, Any] = {**load_file(folder / "adapter_model.safetensors"), **changes}
    save_file(
        {k: t for k, t in held.items() if t is not None}, folder / "adapter_model.safetensors"
    )
    refused(base, named, f"a={folder}")
