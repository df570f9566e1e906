"""`python -m worker.peers.as_gguf FOLDER FILE`: a Llama's safetensors as an unquantised GGUF file,
so that llama.cpp computes the same weights. It has no vocabulary: benchmarks send token ids.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import gguf
import torch
from safetensors import safe_open

from seams.errors import BanyanError, ModelLoadError
from worker.models.config import ModelConfig, read_config, read_json
from worker.models.gguf_model import LAYER, WHOLE

GGUF_NAMES = {name: stored for stored, name in LAYER.items()}
GGUF_WHOLE = {f"{name}.weight": f"{stored}.weight" for stored, name in WHOLE.items()}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor. Raises ModelLoadError for one that a plain Llama lacks."""
    if name in GGUF_WHOLE:
        return GGUF_WHOLE[name]
    parts = name.removeprefix("model.layers.").split(".", 1)
    tensor = parts[-1].removesuffix(".weight")
    if not parts[0].isdigit() or tensor not in GGUF_NAMES:
        raise ModelLoadError(f"A plain Llama has no tensor {name}.")
    return f"blk.{parts[0]}.{GGUF_NAMES[tensor]}.weight"


def paired(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of each head reordered: llama.cpp rotates neighbours, transformers halves."""
    outputs, inputs = weight.shape
    halves = weight.view(outputs // head_dim, 2, head_dim // 2, inputs)
    return halves.transpose(1, 2).reshape(outputs, inputs)


def write_gguf(folder: Path, target: Path) -> None:
    """Write `target`. Raises ModelLoadError."""
    if read_json(folder / "config.json").get("model_type") != "llama":
        raise ModelLoadError("Only a plain Llama can be written as GGUF.")
    config = read_config(folder)
    if config.rope.kind != "default":
        raise ModelLoadError("Only a Llama without stretched positions can be written as GGUF.")
    writer = gguf.GGUFWriter(str(target), "llama")
    _describe(writer, config)
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (not a mapping)
                _add(writer, name, tensors.get_tensor(name), config.head_dim)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context_tokens)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.query_heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_tokens)
    writer.add_tokenizer_model("no_vocab")


def _add(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, head_dim: int) -> None:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = paired(tensor, head_dim)
    if tensor.ndim == 1:
        writer.add_tensor(gguf_name(name), tensor.float().numpy())
        return
    raw = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
    writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m worker.peers.as_gguf", description=__doc__)
    parser.add_argument("folder", type=Path, help="config.json and safetensors")
    parser.add_argument("file", type=Path, help="the GGUF file to write")
    options = parser.parse_args()
    try:
        write_gguf(options.folder, options.file)
    except BanyanError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
