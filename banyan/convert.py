"""`python -m banyan.convert GGUF FOLDER`: a GGUF file to a plain safetensors folder, in bfloat16.

It loads transformers, so it runs in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(gguf: Path, into: Path) -> None:
    """Write config, weights, tokenizer and chat template of `gguf` to the new folder `into`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(into)
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(into)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
