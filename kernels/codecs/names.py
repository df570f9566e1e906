"""Names of KV codecs as an option says them, read and checked without loading torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

MODEL = "model"
FP8 = "fp8"
TURBOQUANT = "turboquant"
KEY_FP8 = 8  # "k8": keys in FP8, for models whose keys are too large for a few bits
_TURBOQUANT = re.compile(r"turboquant(?::k([1-48])v([1-4]))?(?:,boundary=(\d{1,3}))?")


@dataclass(frozen=True)
class CodecName:
    """`model`, `fp8` or `turboquant` with bits of keys and values. The first and the last
    `boundary_layers` layers stay in the model's dtype."""

    kind: str
    key_bits: int = 0
    value_bits: int = 0
    boundary_layers: int = 0

    @property
    def has_fp8(self) -> bool:
        """Whether anything is stored in FP8, so that scales are wanted."""
        return self.kind == FP8 or self.key_bits == KEY_FP8


def parse_codec(text: str) -> CodecName | None:
    """model, fp8, turboquant (k4v4), turboquant:kAvB, each with ",boundary=N" behind TurboQuant;
    None if it is none of these."""
    if text in (MODEL, FP8):
        return CodecName(text)
    found = _TURBOQUANT.fullmatch(text)
    if found is None:
        return None
    keys, values, boundary = (int(part) if part else 0 for part in found.groups())
    return CodecName(TURBOQUANT, keys or 4, values or 4, boundary)
