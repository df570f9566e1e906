"""Names of KV codecs as an option says them, read and checked without loading torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

MODEL = "model"
FP8 = "fp8"
TURBOQUANT = "turboquant"
OSCAR = "oscar"
SINK_TOKENS, WINDOW_TOKENS = 64, 256  # that OSCAR keeps in the model's dtype, where nothing is said
EXACT_TOKENS_MAX = 1 << 16
KEY_FP8 = 8  # "k8": keys in FP8, for models whose keys are too large for a few bits
_TURBOQUANT = re.compile(r"turboquant(?::k([1-48])v([1-4]))?(?:,boundary=(\d{1,3}))?")
_OSCAR = re.compile(r"oscar(?::(?:sinks|window)=\d{1,5}(?:,(?:sinks|window)=\d{1,5})?)?")


@dataclass(frozen=True)
class CodecName:
    """`model`, `fp8`, `turboquant` with bits of keys and values, or `oscar`. The first and the last
    `boundary_layers` layers stay in the model's dtype; so do the first `sink_tokens` of a sequence
    and, for each of its tokens, the `window_tokens` that end with it."""

    kind: str
    key_bits: int = 0
    value_bits: int = 0
    boundary_layers: int = 0
    sink_tokens: int = 0
    window_tokens: int = 0

    @property
    def has_fp8(self) -> bool:
        """Whether anything is stored in FP8, so that scales are wanted."""
        return self.kind == FP8 or self.key_bits == KEY_FP8


def parse_codec(text: str) -> CodecName | None:
    """model, fp8, turboquant (k4v4), turboquant:kAvB, each with ",boundary=N" behind TurboQuant,
    oscar, oscar:sinks=N,window=N; None if it is none of these."""
    if text in (MODEL, FP8):
        return CodecName(text)
    if text.startswith(OSCAR):
        return _parse_oscar(text)
    found = _TURBOQUANT.fullmatch(text)
    if found is None:
        return None
    keys, values, boundary = (int(part) if part else 0 for part in found.groups())
    return CodecName(TURBOQUANT, keys or 4, values or 4, boundary)


def _parse_oscar(text: str) -> CodecName | None:
    """With each option once at most, in any order."""
    if _OSCAR.fullmatch(text) is None:
        return None
    options = [part.split("=") for part in text.partition(":")[2].split(",") if part]
    given = {name: int(tokens) for name, tokens in options}
    if len(given) < len(options):
        return None
    sinks, window = given.get("sinks", SINK_TOKENS), given.get("window", WINDOW_TOKENS)
    if window < 1 or max(sinks, window) > EXACT_TOKENS_MAX:
        return None
    return CodecName(OSCAR, 2, 2, 0, sinks, window)
