"""`python -m banyan.convert [--tokenizer] GGUF FOLDER`: a GGUF file to a plain safetensors folder,
in bfloat16, or its tokenizer only.

It loads transformers, so it runs in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert_tokenizer(gguf: Path, into: Path) -> None:
    """Write tokenizer and chat template of `gguf` to the new folder `into`."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(into)


def convert(gguf: Path, into: Path) -> None:
    """Write config, weights, tokenizer and chat template of `gguf` to the new folder `into`."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    convert_tokenizer(gguf, into)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(into)


if __name__ == "__main__":
    chosen = convert_tokenizer if sys.argv[1] == "--tokenizer" else convert
    chosen(Path(sys.argv[-2]), Path(sys.argv[-1]))
