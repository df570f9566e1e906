"""Loads a decoder that only transformers has; the one place of a replica that imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kernels.backends import backend_for
from seams.errors import ModelLoadError
from seams.limits import TOKENS_MAX
from worker.config import ReplicaConfig
from worker.models.adapter import AdaptedModel
from worker.models.adapter_check import check_adapted
from worker.models.adapter_probe import attention_layers
from worker.models.config import end_tokens, read_json
from worker.models.fingerprint import document_fingerprint
from worker.models.weights import FLOATS, Checkpoint, Progress

# Of config.json, what decides neither a key nor a value.
NOT_IDENTITY = (
    *("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache"),
)


def load_adapted(
    config: ReplicaConfig, device: torch.device, progress: Progress | None = None
) -> AdaptedModel:
    """The model in the folder `config.model`, checked against itself, without pools.

    Raises ModelLoadError, one sentence, also for architectures that pages cannot serve: those with
    state beyond attention's keys and values, encoders, foreign masks.
    """
    folder = Path(config.model)
    document = read_json(folder / "config.json")
    if document.get("quantization_config") is not None:
        raise ModelLoadError("Quantised checkpoints of this model type are not supported.")
    known = _configuration(folder, document)
    context = _context(config, known)
    vocab = int(known.get_text_config(decoder=True).vocab_size)
    dtype = _dtype(config.dtype, known, device)
    with Checkpoint(folder) as checkpoint:
        fields = {k: v for k, v in document.items() if k not in NOT_IDENTITY}
        hashing = None if progress is None else _half(progress)
        fingerprint = document_fingerprint(
            checkpoint, {"computed by": "transformers", **fields}, hashing
        )
        total = checkpoint.bytes_total
    model = _read(folder, dtype, device)
    layers = attention_layers(model, context, vocab)
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").is_file():
        generation = read_json(folder / "generation_config.json")
    adapted = AdaptedModel(
        model,
        layers,
        backend_for(device),
        name=config.served_name,
        fingerprint=fingerprint,
        block_tokens=config.block_tokens,
        context_tokens=context,
        vocab_tokens=vocab,
        eos_token_ids=end_tokens(
            {"eos_token_id": known.get_text_config(decoder=True).eos_token_id}, generation, vocab
        ),
    )
    check_adapted(adapted, model)
    if progress is not None:
        progress(2 * total, 2 * total)
    return adapted


def _half(progress: Progress) -> Progress:
    return lambda done, total: progress(done, 2 * total)


def _configuration(folder: Path, document: dict[str, Any]) -> Any:
    """transformers' own configuration of a causal decoder."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = str(document.get("model_type"))[:64]
    try:
        known = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        is_decoder = type(known) in MODEL_FOR_CAUSAL_LM_MAPPING
    except Exception as error:  # unknown types and bad fields raise a dozen classes
        raise ModelLoadError(
            f"The model's config.json is not one of model type {kind!r} that transformers knows."
        ) from error
    if not is_decoder or known.is_encoder_decoder:
        raise ModelLoadError(f"Model type {kind!r} is not a decoder that generates text.")
    return known


def _context(config: ReplicaConfig, known: Any) -> int:
    """Tokens to serve; a RoPE that changes with the longest sequence ends where it would."""
    text = known.get_text_config(decoder=True)
    longest = min(int(getattr(text, "max_position_embeddings", 0) or 0), TOKENS_MAX)
    if longest <= 0:
        raise ModelLoadError("The model's config.json names no context length.")
    ropes = getattr(text, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)]
    for rope in nested or [ropes]:
        if rope.get("rope_type") == "dynamic":
            raise ModelLoadError("RoPE type 'dynamic' is not supported: cached keys would change.")
        if rope.get("rope_type") == "longrope":
            longest = min(longest, int(rope["original_max_position_embeddings"]))
    context = config.context_tokens or longest
    if not 0 < context <= longest:
        raise ModelLoadError(f"A context of {context} tokens is not within the model's {longest}.")
    return context


def _dtype(name: str, known: Any, device: torch.device) -> torch.dtype:
    """As load.choose_dtype, with what the configuration declares in place of the tensors'."""
    if name == "auto":
        declared = known.dtype if known.dtype in FLOATS else torch.bfloat16
        return declared if device.type == "cuda" else torch.float32
    for dtype, known_name in FLOATS.items():
        if name == known_name:
            return dtype
    raise ModelLoadError("The dtype must be auto, bf16, fp16 or fp32.")


def _read(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        model = model.to(device).eval()
    except Exception as error:  # damaged files, missing optional packages, no memory
        raise ModelLoadError(
            f"transformers cannot load the model ({type(error).__name__})."
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(f"The checkpoint lacks the tensor {missing[0]}.")
    return model
