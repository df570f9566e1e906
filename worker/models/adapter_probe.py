"""What a transformers decoder asks of attention: shapes and windows per layer, seen in one forward.

The model is run once with an attention function and a mask function of ours that only look. A mask
is read from the function that makes it, at positions over the whole context, so a window longer
than the probe is seen too. Knows no pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from seams.errors import ModelLoadError

PROBE = "banyan-probe"
PROBE_TOKENS = 8

MaskFunction = Callable[..., torch.Tensor]
"""(batch, head, query position, key positions int64 [n]) -> bool, whether the key is seen."""


@dataclass(frozen=True)
class AttentionLayer:
    """One call of attention per forward pass. window 0 = every position before is seen."""

    query_heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int


@dataclass
class _Seen:
    """What one forward pass showed."""

    positions: int  # the context
    masks: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # kept: their addresses
    layers: list[AttentionLayer] = field(default_factory=list)


_seen: list[_Seen] = []  # the probe under way; one at a time, on the loading thread


@torch.inference_mode()
def attention_layers(model: Any, positions: int, vocab: int) -> tuple[AttentionLayer, ...]:
    """Layers in the order of their calls. Switches the model's attention to PROBE.

    Raises ModelLoadError if the model's state is not attention's keys and values alone, or its
    masks are not causal ones with or without a sliding window.
    """
    _register()
    if not type(model)._can_set_attn_implementation():
        raise ModelLoadError(f"{_kind(model)} models do not let their attention be replaced.")
    model.set_attn_implementation(PROBE)
    count = min(PROBE_TOKENS, positions)
    token_ids = torch.arange(count, device=model.device).unsqueeze(0) % vocab
    seen = _Seen(positions)
    _seen.append(seen)
    try:
        positions_of = torch.arange(count, device=model.device).unsqueeze(0)
        model(input_ids=token_ids, position_ids=positions_of, use_cache=False)
    except ModelLoadError:
        raise
    except Exception as error:  # the model's own code, of any kind
        raise ModelLoadError(
            f"{_kind(model)} models cannot run with another attention ({type(error).__name__})."
        ) from error
    finally:
        _seen.pop()
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(seen.layers) > layers:
        raise ModelLoadError(f"{_kind(model)} models attend more than once in a layer.")
    if len(seen.layers) < layers:
        raise ModelLoadError(
            f"Of the {layers} layers of this {_kind(model)} model {len(seen.layers)} keep their "
            "state as attention's keys and values; all must."
        )
    return tuple(seen.layers)


def _kind(model: Any) -> str:
    return str(model.config.model_type)[:64]


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PROBE, _look_at_attention)
    AttentionMaskInterface.register(PROBE, _look_at_mask)


def _look_at_mask(
    *, q_length: int, kv_length: int, mask_function: MaskFunction, device: Any, **_: Any
) -> torch.Tensor:
    seen = _seen[-1]
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    seen.masks.append((mask, window_of(mask_function, seen.positions)))
    return mask


def window_of(mask_function: MaskFunction, positions: int) -> int:
    """The sliding window of a causal mask, 0 for none; ModelLoadError for any other mask."""
    zero = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(positions)
    window = positions
    for query in (positions - 1, positions // 2, positions // 3, 0):
        at = torch.tensor(query)
        found = torch.broadcast_to(mask_function(zero, zero, at, keys), keys.shape)
        if query == positions - 1:
            window = int(found.sum())
        if not torch.equal(found, (keys <= query) & (keys > query - window)):
            raise ModelLoadError("The model's attention mask is neither causal nor a window.")
    return 0 if window >= positions else window


def _look_at_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, N, D], key [1, Hkv, N, D], value [1, Hkv, N, Dv] -> zeros [1, N, Hq, Dv]."""
    seen = _seen[-1]
    windows = [
        window
        for mask, window in seen.masks
        if attention_mask is not None and attention_mask.data_ptr() == mask.data_ptr()
    ]
    if len(windows) != 1:
        raise ModelLoadError("The model's attention has a mask of its own making.")
    batch, heads, rows, width = query.shape
    if batch != 1 or key.shape[:3] != value.shape[:3] or key.shape[2:] != query.shape[2:]:
        raise ModelLoadError("The model's attention is not one of queries over keys of a row each.")
    layer = AttentionLayer(heads, key.shape[1], width, value.shape[3], windows[0])
    seen.layers.append(layer)
    return query.new_zeros(batch, rows, heads, layer.v_dim), None
