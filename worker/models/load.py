"""From a replica's configuration to a loaded model and the size of its pools; reads no text files.

Imports transformers only for a decoder that this project lacks: else config.json and safetensors,
or one GGUF file, are all that is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path

import torch

from kernels.codecs.names import MODEL
from kvstore.groups import GroupKind, KVGroup
from seams.errors import ModelLoadError, OutOfBlocks
from worker.config import ReplicaConfig
from worker.models.base import Model, ModelSpec
from worker.models.config import ModelConfig, NotNative
from worker.models.fingerprint import model_fingerprint
from worker.models.lora import load_adapter, named_folders
from worker.models.making import compiled_dtype, make_model, refuse_variant
from worker.models.memory import available_bytes
from worker.models.opening import open_model
from worker.models.source import TensorSource
from worker.models.weights import FLOATS, Progress, checkpoint_dtype, load_weights

FAKE = "fake:"
CPU_POOL_BYTES_MAX = 1 << 30  # where no pool_gib is given
CUDA_POOL_SHARE = 0.9
BLOCKS_MAX = 1 << 20  # of one group; the engine keeps a record of each
FAKE_CONTEXT_TOKENS = 4096
FAKE_BLOCKS = 4096  # a fake model's blocks are so small that memory is no measure


def load_model(config: ReplicaConfig, progress: Progress | None = None) -> Model:
    """The model that `config.model` names, without pools yet. Sets torch's thread count.

    `progress` is told of hashing and reading as one way of twice the files' bytes. Raises
    ModelLoadError, one sentence.
    """
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    if config.model.startswith(FAKE):
        _refuse_codec(config, "A fake model")
        return _load_fake(config)
    device = choose_device(config.device)
    try:
        parsed, source = open_model(Path(config.model))
    except NotNative:
        if not (Path(config.model) / "config.json").is_file():
            raise
        from worker.models.adapter_load import load_adapted

        refuse_variant(config, "it is computed through transformers.")
        _refuse_codec(config, "A model computed through transformers")
        if config.adapters:
            message = "Adapters of models computed through transformers are not served."
            raise ModelLoadError(message) from None
        return load_adapted(config, device, progress)
    with source:
        return _load(config, parsed, source, device, progress)


def _load(
    config: ReplicaConfig,
    parsed: ModelConfig,
    source: TensorSource,
    device: torch.device,
    progress: Progress | None,
) -> Model:
    context = config.context_tokens or parsed.context_tokens
    if not 0 < context <= parsed.context_tokens:
        raise ModelLoadError(
            f"A context of {context} tokens is not within the model's {parsed.context_tokens}."
        )
    dtype = compiled_dtype(config, parsed, checkpoint_dtype(source), device)
    compiled = dtype is not None
    if dtype is None:
        dtype = choose_dtype(config.dtype, source, device)
    adapters = tuple(
        load_adapter(name, folder, parsed, dtype, device)
        for name, folder in named_folders(config.adapters).items()
    )
    hashing, reading = _two_parts(progress)
    fingerprint = model_fingerprint(source, parsed, hashing)
    weights = load_weights(source, parsed, dtype, device, reading)
    return make_model(
        config,
        parsed,
        weights,
        fingerprint=fingerprint,
        context_tokens=context,
        compiled=compiled,
        adapters=adapters,
    )


def plan_blocks(config: ReplicaConfig, spec: ModelSpec) -> tuple[int, ...]:
    """Blocks per group for EngineConfig.blocks; call it after the weights are loaded.

    Memory is `pool_gib`; by default 1 GiB or half of what is available, whichever is less, on CPU
    and 90 % of what is free on CUDA. Every group gets as many blocks as the full one, but a window
    group no more than it can use, and one that repeats group 0's layers no more than half of the
    memory. Raises OutOfBlocks if a group would have none.
    """
    if config.model.startswith(FAKE) and config.pool_gib is None:
        return (FAKE_BLOCKS,) * len(spec.groups)
    pool = _pool_bytes(config)
    caps = [_useful_blocks(config, spec, group, pool) for group in spec.groups]

    def cost(blocks: int) -> int:
        sizes = (group.block_bytes for group in spec.groups)
        return sum(min(blocks, cap) * size for cap, size in zip(caps, sizes, strict=True))

    blocks = bisect_right(range(1, BLOCKS_MAX + 1), pool, key=cost)
    if blocks == 0:
        raise OutOfBlocks(
            f"One KV block needs {cost(1) / 2**20:.2f} MiB and the pool has {pool / 2**20:.2f} MiB."
        )
    return tuple(min(blocks, cap) for cap in caps)


def choose_device(name: str) -> torch.device:
    """auto, cpu or cuda -> the device; ModelLoadError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ModelLoadError("The device must be auto, cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError("There is no CUDA device here, or this torch cannot use it.")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def choose_dtype(name: str, source: TensorSource, device: torch.device) -> torch.dtype:
    """auto, bf16, fp16 or fp32 -> the dtype of weights and KV.

    For torch: auto is the source's own on a GPU and fp32 on a CPU, where it rounds differently for
    different batches, and in bf16 that is enough to change the text of a cached answer.
    """
    if name == "auto":
        return checkpoint_dtype(source) if device.type == "cuda" else torch.float32
    for dtype, known in FLOATS.items():
        if name == known:
            return dtype
    raise ModelLoadError("The dtype must be auto, bf16, fp16 or fp32.")


def _refuse_codec(config: ReplicaConfig, what: str) -> None:
    if config.kv_codec != MODEL:
        raise ModelLoadError(f"{what} keeps keys and values as it computes them: no KV codec.")


def _load_fake(config: ReplicaConfig) -> Model:
    from worker.models.fake import fake_model

    return fake_model(
        config.model.removeprefix(FAKE),
        context_tokens=config.context_tokens or FAKE_CONTEXT_TOKENS,
        block_tokens=config.block_tokens,
        name=config.served_name,
    )


def _two_parts(progress: Progress | None) -> tuple[Progress | None, Progress | None]:
    if progress is None:
        return None, None
    tell = progress
    return (
        lambda done, total: tell(done, 2 * total),
        lambda done, total: tell(total + done, 2 * total),
    )


def _pool_bytes(config: ReplicaConfig) -> int:
    if config.pool_gib is not None:
        return int(config.pool_gib * 2**30)
    device = torch.device("cpu") if config.model.startswith(FAKE) else choose_device(config.device)
    available = available_bytes(device)
    if device.type == "cuda":
        return int(available * CUDA_POOL_SHARE)
    return min(CPU_POOL_BYTES_MAX, available // 2)


def _useful_blocks(config: ReplicaConfig, spec: ModelSpec, group: KVGroup, pool: int) -> int:
    """A window group holds the sinks and windows of running sequences, the step's new rows, and as
    much again for cached prefixes.

    One that holds exactly what group 0 has as codes takes half of the memory at most, but what one
    sequence needs: block by block with group 0, of which each takes a fraction of its own, it would
    leave too little for the codes. And a quarter at least: a cached prefix is found only where a
    window of it is.
    """
    if group.kind is not GroupKind.WINDOW:
        return BLOCKS_MAX
    window = -(-group.window_tokens // spec.block_tokens) + 1 + group.sink_blocks(spec.block_tokens)
    step = -(-config.step_tokens_max // spec.block_tokens)
    useful = 2 * (config.running_max * window + step)
    if set(group.layers).isdisjoint(spec.groups[0].layers):
        return useful
    one, most = window + step, pool // (group.block_bytes * group.ranks)
    return max(one, min(most // 2, max(useful, most // 4)))
