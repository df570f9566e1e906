"""TensorSource: what a model is loaded from, however its tensors are stored; knows no model.

One seam for all weight formats: a loader asks for dense tensors by their Hugging Face names. What
is quantised on disk is dequantised here, when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

import torch


class TensorSource(Protocol):
    """Open files that hold a model's tensors. Close it after use; tensors read stay valid."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def names(self) -> list[str]:
        """Of all dense tensors, sorted."""
        ...

    @property
    def files(self) -> list[Path]:
        """That hold the tensors, sorted."""
        ...

    @property
    def bytes_total(self) -> int:
        """Of all files."""
        ...

    @property
    def bytes_read(self) -> int:
        """How much of bytes_total `tensor` and `stored` have read since the source was opened."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What the model is meant to be computed in; not always a type we can compute in."""
        ...

    @property
    def settings(self) -> str:
        """What, besides the stored bytes, decides the values of `tensor`; "" for nothing."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A dense tensor on the CPU: of any type as stored, float32 where it was quantised.

        Raises ModelLoadError, one sentence, if it is not there or damaged.
        """
        ...

    def stored(self) -> Iterator[tuple[list[object], torch.Tensor]]:
        """Every stored tensor in the order of names: what it is (JSON values) and its bytes.

        Raises ModelLoadError if one is damaged.
        """
        ...
