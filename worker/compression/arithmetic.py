"""Bytes of a token as pencil and paper give them, from a codec's name and a model's shape alone.

It shares nothing with the codecs that it checks: a layout that takes another byte shows in the
report as a ratio that is not 1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from seams.errors import InvalidRequest

NORM_BYTES = 2  # of a vector of TurboQuant's: its length in fp16
STEP_BYTES = 4  # of a vector of OSCAR's: the step and the least number in fp16
OSCAR_BITS = 2
WHOLE_BYTE = 8  # "k8" is FP8: a byte for each number and nothing beside
SINKS, WINDOW = 64, 256  # tokens that OSCAR keeps exactly where nothing else is said
_TURBOQUANT = re.compile(r"turboquant(?::k(\d)v(\d))?(?:,boundary=(\d+))?")
_OSCAR = re.compile(r"oscar(?::(.*))?")


@dataclass(frozen=True)
class Shape:
    """What of a model decides the size of its KV. `windows` by layer, 0 = it sees everything."""

    windows: tuple[int, ...]
    kv_heads: int
    head_dim: int
    number_bytes: int  # of its dtype
    block_tokens: int

    def share(self, layer: int, context: int) -> float:
        """Of `context` tokens that a sequence holds in a layer: all, or a window in whole blocks
        wherever it begins in one. Where all layers slide the first holds all of them."""
        window = self.windows[layer]
        if window == 0 or (layer == 0 and all(self.windows)):
            return 1.0
        return self.window_tokens(window, context) / context

    def window_tokens(self, window: int, context: int) -> int:
        """Room for a window, no more than for the whole context."""
        blocks = -(-(window - 1) // self.block_tokens) + 1
        return min(blocks * self.block_tokens, context)


def plain_token_bytes(shape: Shape, context: int) -> float:
    """In the model's dtype, all layers, in a sequence of `context` tokens."""
    return token_bytes("model", shape, context)


def token_bytes(codec: str, shape: Shape, context: int) -> float:
    """In the codec. Raises InvalidRequest for a name that it cannot work out."""
    layers = range(len(shape.windows))
    return shape.kv_heads * sum(_layer_bytes(codec, shape, layer, context) for layer in layers)


def _layer_bytes(codec: str, shape: Shape, layer: int, context: int) -> float:
    """Keys and values of one KV head."""
    share, plain = shape.share(layer, context), 2 * shape.head_dim * shape.number_bytes
    if codec == "model":
        return share * plain
    if codec == "fp8":
        return share * 2 * shape.head_dim
    if found := _TURBOQUANT.fullmatch(codec):
        keys, values, boundary = (int(part) if part else 0 for part in found.groups())
        if min(layer, len(shape.windows) - 1 - layer) < boundary:
            return share * plain
        return share * (_turbo_bytes(keys or 4, shape) + _turbo_bytes(values or 4, shape))
    if found := _OSCAR.fullmatch(codec):
        if shape.windows[layer]:
            return share * plain
        code = -(-shape.head_dim * OSCAR_BITS // 8) + STEP_BYTES
        return 2 * code + _exact_tokens(found[1] or "", shape, context) / context * plain
    raise InvalidRequest(f"The report cannot work out the bytes of {codec}.")


def _turbo_bytes(bits: int, shape: Shape) -> int:
    if bits == WHOLE_BYTE:
        return shape.head_dim
    return -(-shape.head_dim * bits // 8) + NORM_BYTES


def _exact_tokens(options: str, shape: Shape, context: int) -> int:
    """Room for tokens in the model's dtype: whole blocks of sinks, and a window."""
    given = {"sinks": SINKS, "window": WINDOW}
    given |= {name: int(n) for name, n in (o.split("=") for o in options.split(",") if o)}
    sinks = -(-given["sinks"] // shape.block_tokens) * shape.block_tokens
    return min(sinks + shape.window_tokens(given["window"], context), context)
