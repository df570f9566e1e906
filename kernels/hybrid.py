"""Attention over layers that are stored twice: every position as codes, sinks and recent tokens in
the model's dtype as well. Knows batches and pages, no sequence's history and no model.

A row at position t reads position p exactly if p < sink_tokens or p > t - window_tokens, else from
its code. That is a function of p and t alone: where a prompt was cut, what was cached and what
shares the batch change nothing, and no token is ever moved from one kind of page to the other; its
exact page is let go when the window has passed it. What a row does not read exactly begins with
position 0, so it is a causal problem of its own over fewer positions. Both parts are merged by
log-sum-exp, each in the basis it is stored in.

Source of the mixture: Together AI's OSCAR (arXiv:2605.17757), which keeps recent tokens in a ring
and encodes them as they leave it.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.attention import Attended, AttentionBackend, AttentionBatch, AttentionSpec
from kernels.backends import is_pure_decode
from kernels.codecs.pages import CodecPages, attend_coded
from kernels.layout import LayerPages
from kernels.merge import merge, with_sinks


@dataclass(frozen=True)
class Reach:
    """What a row reads exactly: the first `sink_tokens` positions, whole blocks of them, and its
    own with the window_tokens - 1 before it."""

    sink_tokens: int
    window_tokens: int

    def __post_init__(self) -> None:
        assert self.sink_tokens >= 0 and self.window_tokens > 0


@dataclass(frozen=True)
class Behind:
    """Rows that see more than their window, as a batch of its own: positions before the window,
    causal from position 0. Its tables name mixed pages."""

    rows: torch.Tensor | None  # int64, of the step's rows; None = all
    batch: AttentionBatch


@dataclass(frozen=True)
class HybridStep:
    """One step of such layers. Both groups hold the same tokens at the same positions."""

    codes: AttentionBatch
    exact: AttentionBatch
    reach: Reach
    exact_from: int  # blocks of mixed pages from here on are exact ones

    def __post_init__(self) -> None:
        assert self.codes.lengths.dim() == 1 and self.codes.kv_positions is None, "all alike"
        assert self.codes.starts_list == self.exact.starts_list
        assert self.reach.sink_tokens % self.codes.block_tokens == 0, "whole blocks of sinks"

    @property
    def _sink_blocks(self) -> int:
        return self.reach.sink_tokens // self.codes.block_tokens

    @cached_property
    def behind(self) -> Behind | None:
        """None if no row sees beyond its window."""
        starts, window = self.codes.starts_list, self.reach.window_tokens
        left = [max(0, length - window) for length in self.codes.lengths_list]
        begins = [max(a, b - n) for a, b, n in zip(starts, starts[1:], left, strict=False)]
        spans = [range(a, b) for a, b in zip(begins, starts[1:], strict=True)]
        rows = [row for span in spans for row in span]
        if not rows:
            return None
        device, every = self.codes.tables.device, len(rows) == starts[-1]
        index = None if every else torch.tensor(rows, dtype=torch.int64, device=device)
        firsts = [0]
        for span in spans:
            firsts.append(firsts[-1] + len(span))
        sinks = self.exact.tables[:, : self._sink_blocks]
        sinks = torch.where(sinks < 0, sinks, sinks + self.exact_from)
        tables = torch.cat((sinks, self.codes.tables[:, sinks.shape[1] :]), 1)
        made = replace(
            self._shortened(tables, left, window),
            starts=torch.tensor(firsts, dtype=torch.int32, device=device),
            starts_list=tuple(firsts),
            rows_max=max(len(span) for span in spans),
        )
        if index is not None:
            made = replace(made, slots=made.slots[index], positions=made.positions[index])
        return Behind(index, made)

    @cached_property
    def sinks(self) -> AttentionBatch | None:
        """Of pure decode: the sinks before each row's window, over exact pages; None without."""
        window, most = self.reach.window_tokens, self.reach.sink_tokens
        left = [min(most, max(0, length - window)) for length in self.exact.lengths_list]
        made = self._shortened(self.exact.tables[:, : self._sink_blocks], left, window)
        return replace(made, lengths=made.lengths.clamp(max=most)) if max(left, default=0) else None

    @cached_property
    def middle(self) -> AttentionBatch | None:
        """Of pure decode: what lies between sinks and window, over codes; None without."""
        passed = self.reach.window_tokens + self.reach.sink_tokens
        left = [max(0, length - passed) for length in self.codes.lengths_list]
        if not max(left, default=0):
            return None
        tables = self.codes.tables[:, self._sink_blocks :].contiguous()
        return self._shortened(tables, left, passed)

    def _shortened(self, tables: torch.Tensor, left: list[int], passed: int) -> AttentionBatch:
        """The step as if each sequence ended `passed` positions earlier, or were empty."""
        return replace(
            self.codes,
            tables=tables,
            lengths=(self.codes.lengths - passed).clamp(min=0),
            lengths_list=tuple(left),
            length_max=max(left, default=0),
            plans={},
        )


class MixedBlocks:
    """Which entries of a tensor of mixed blocks are exact, found once for all layers."""

    def __init__(self, exact_from: int) -> None:
        self.exact_from = exact_from
        self._found: MutableMapping[torch.Tensor, tuple[torch.Tensor, ...]]
        self._found = WeakTensorKeyDictionary()

    def of(self, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """int64 each: the code block to read for every entry, any for exact ones; the entries that
        are exact, and their blocks."""
        found = self._found.get(blocks)
        if found is None:
            is_exact = blocks >= self.exact_from
            places = is_exact.nonzero().flatten()
            codes = blocks.masked_fill(is_exact, 0)
            found = self._found[blocks] = (codes, places, blocks[places] - self.exact_from)
        return found


class HybridPages:
    """The pages of one layer: `codes` of every position, `exact` ones of sinks and windows."""

    def __init__(self, codes: CodecPages, exact: LayerPages, blocks: MixedBlocks) -> None:
        self.codes, self.exact = codes, exact
        self.mixed = MixedPages(codes, exact, blocks)

    def write(self, step: HybridStep, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the step's rows in both: keys [N, Hkv, qk_dim], values [N, Hkv, v_dim]."""
        self.codes.write(step.codes.slots, keys, values)
        self.exact.write(step.exact.slots, keys, values)


class MixedPages:
    """PageLoader that reads code blocks and, from `exact_from` on, exact ones as one kind of page,
    all in the codec's basis. Nobody writes through it."""

    def __init__(self, codes: CodecPages, exact: LayerPages, blocks: MixedBlocks) -> None:
        self._codes, self._exact, self._blocks = codes, exact, blocks

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Not to be had: rows go into both kinds of pages, at different slots."""
        raise NotImplementedError("Rows are written through HybridPages.")

    def gather(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As PageLoader.gather, float32, turned."""
        codes, places, exact = self._blocks.of(blocks)
        keys, values = self._codes.gather(codes)
        if len(places):
            codec, (exact_keys, exact_values) = self._codes.codec, self._exact.gather(exact)
            keys[places] = codec.keys.turn(exact_keys).to(keys.dtype)
            values[places] = codec.values.turn(exact_values).to(values.dtype)
        return keys, values


class HybridAttention:
    """Attention of a HybridStep by another backend, part by part: the window; what lies behind it;
    in pure decode that is sinks and middle apart, each over pages that kernels read in place."""

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name = inner.name

    def attend(
        self,
        q: torch.Tensor,
        pages: HybridPages,
        step: HybridStep,
        spec: AttentionSpec,
        want_lse: bool = False,
    ) -> Attended:
        """As AttentionBackend.attend; the rows must be in the pages. `spec` has no window."""
        assert spec.window == 0, "what slides is stored once"
        part = replace(spec, sinks=None)
        near = replace(part, window=step.reach.window_tokens)
        found = self._inner.attend(q, pages.exact, step.exact, near, want_lse=True)
        found = Attended(found.out.float(), found.lse)
        if is_pure_decode(step.codes):
            found = self._decode(q, pages, step, part, found)
        elif step.behind is not None:
            found = self._prefill(q, pages, step.behind, part, found)
        if spec.sinks is not None:
            found = with_sinks(found, spec.sinks)
        return Attended(found.out.to(q.dtype), found.lse if want_lse else None)

    def _decode(
        self,
        q: torch.Tensor,
        pages: HybridPages,
        step: HybridStep,
        spec: AttentionSpec,
        found: Attended,
    ) -> Attended:
        if step.sinks is not None:
            sinks = self._inner.attend(q, pages.exact, step.sinks, spec, want_lse=True)
            found = merge(found, sinks)
        if step.middle is not None:
            codes = pages.codes
            found = merge(
                found, attend_coded(self._inner, codes.codec, q, codes, step.middle, spec)
            )
        return found

    def _prefill(
        self,
        q: torch.Tensor,
        pages: HybridPages,
        behind: Behind,
        spec: AttentionSpec,
        found: Attended,
    ) -> Attended:
        """`found` is changed in place where only some rows see beyond their window."""
        rows, codec, mixed = behind.rows, pages.codes.codec, pages.mixed
        if rows is None:
            return merge(found, attend_coded(self._inner, codec, q, mixed, behind.batch, spec))
        assert found.lse is not None
        part = attend_coded(self._inner, codec, q[rows], mixed, behind.batch, spec)
        both = merge(Attended(found.out[rows], found.lse[rows]), part)
        assert both.lse is not None
        found.out[rows], found.lse[rows] = both.out, both.lse
        return found
