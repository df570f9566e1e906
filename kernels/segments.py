"""Cuts a step into segments that one attention call each can serve; knows no keys and no values.

A step-constant plan: which pages to gather, which rows read them, what is masked. Made once a step
and window, used by every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.attention import AttentionBatch

# Decode sequences are attended together until their gathered keys fall out of the cache; past that,
# or when padding to the longest would waste more than a quarter, apart.
BUCKET_POSITIONS_MAX = 8192
BUCKET_WASTE_FREE = 128
# A prefill is cut in tiles of rows: a tile reads no key after its last row (half of a square mask).
TILE_ROWS = 128


@dataclass(frozen=True)
class Tile:
    """Rows of a prefill and the keys they can see: physical positions [key_first, key_end) of the
    segment's gathered ones. mask float32 [1 | Hkv, 1, rows, keys], 0 or -inf."""

    row_first: int
    row_end: int
    key_first: int
    key_end: int
    mask: torch.Tensor


@dataclass(frozen=True)
class Segment:
    """Pages gathered together: one prefill (tiles), or decode rows of C sequences (no tiles).

    Gathered keys are [Hkv, C, keys, D], keys = whole pages cut to `keys`. `unused` are gathered
    places that were never written and must be blanked: int64 into C * keys (the same for all
    heads), or bool [Hkv, C, keys, 1].
    """

    rows: slice | torch.Tensor  # of the flat token rows; int64 [C] if decode and not contiguous
    sequences: int  # C
    blocks: torch.Tensor  # int64 [C * pages]
    keys: int
    mask: torch.Tensor | None = None  # decode: float32 [C, 1 | Hkv, 1, keys], None = all seen
    unused: torch.Tensor | None = None
    tiles: tuple[Tile, ...] = ()
    hollow: bool = False  # some row sees no key at all: fused kernels answer NaN there


def segments_of(batch: AttentionBatch, window: int) -> list[Segment]:
    """The segments of `batch` for layers with this window (0 = none); together all rows with
    something to do, each once. Kept in batch.plans."""
    key = ("segments", window)
    found: list[Segment] | None = batch.plans.get(key)
    if found is None:
        found = list(_plan(batch, window))
        batch.plans[key] = found
    return found


def _plan(batch: AttentionBatch, window: int) -> Iterator[Segment]:
    decode = []
    for sequence, length in enumerate(batch.lengths_list):
        rows = batch.starts_list[sequence + 1] - batch.starts_list[sequence]
        if rows == 1 and length > 0:
            decode.append(sequence)
        elif rows > 1:
            yield _prefill(batch, window, sequence)
    uniform = _uniform(batch)
    for bucket in _buckets(batch, window if uniform else 0, decode):
        if len(bucket) == 1 and uniform:
            yield _single(batch, window, bucket[0])
        else:
            yield _decode(batch, window, bucket)


def _uniform(batch: AttentionBatch) -> bool:
    """All heads alike and logical positions equal physical: masks follow from host numbers."""
    return batch.lengths.dim() == 1 and batch.kv_positions is None


def _first_block(batch: AttentionBatch, window: int, first_position: int) -> int:
    """First block that a row at `first_position` (the segment's lowest) can see."""
    if window == 0 or not _uniform(batch):
        return 0
    return max(0, first_position - window + 1) // batch.block_tokens


def _buckets(batch: AttentionBatch, window: int, sequences: list[int]) -> Iterator[list[int]]:
    """Decode sequences of like length, in row order inside a bucket."""

    def seen(sequence: int) -> int:
        length = batch.lengths_list[sequence]
        return min(length, window + batch.block_tokens) if window else length

    bucket: list[int] = []
    used = 0
    for sequence in sorted(sequences, key=seen):
        padded = (len(bucket) + 1) * seen(sequence)
        waste = padded - used - seen(sequence)
        if bucket and (
            padded > BUCKET_POSITIONS_MAX or waste > max(BUCKET_WASTE_FREE, padded // 4)
        ):
            yield sorted(bucket)
            bucket, used = [], 0
        bucket.append(sequence)
        used += seen(sequence)
    if bucket:
        yield sorted(bucket)


def _row_index(batch: AttentionBatch, sequences: list[int]) -> slice | torch.Tensor:
    rows = [batch.starts_list[sequence] for sequence in sequences]
    if rows[-1] - rows[0] == len(rows) - 1:
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64, device=batch.tables.device)


def _single(batch: AttentionBatch, window: int, sequence: int) -> Segment:
    """One decode row: its keys are cut to exactly what it sees, so only a window needs a mask."""
    length, row = batch.lengths_list[sequence], batch.starts_list[sequence]
    tokens = batch.block_tokens
    first = _first_block(batch, window, length - 1)
    keys = length - first * tokens
    blocks = batch.tables[sequence, first : -(-length // tokens)].long()
    mask = None
    if window and keys > window:
        mask = torch.zeros(1, 1, 1, keys, device=blocks.device)
        mask[..., : keys - window] = -torch.inf
    return Segment(slice(row, row + 1), 1, blocks, keys, mask)


def _decode(batch: AttentionBatch, window: int, sequences: list[int]) -> Segment:
    """Decode rows of several sequences, padded to the one with most pages."""
    tokens, device = batch.block_tokens, batch.tables.device
    lengths = [batch.lengths_list[s] for s in sequences]
    firsts = [_first_block(batch, window, length - 1) for length in lengths]
    pages = [-(-length // tokens) - first for length, first in zip(lengths, firsts, strict=True)]
    most = max(pages)
    chosen = torch.tensor(sequences, device=device)
    first = torch.tensor(firsts, device=device).unsqueeze(1)
    column = torch.arange(most, device=device) + first  # [C, pages]
    tables = batch.tables.index_select(0, chosen).long()
    blocks = tables.gather(1, column.clamp(max=tables.shape[1] - 1))
    physical = torch.arange(most * tokens, device=device) + first * tokens  # [C, keys]
    rows = _row_index(batch, sequences)
    if not _uniform(batch):
        written = _written(batch, chosen, physical, blocks)
        query = batch.positions[rows].unsqueeze(1)
        visible = _visible(batch, window, chosen, written, query)
        return Segment(
            rows,
            len(sequences),
            blocks.clamp(min=0).flatten(),
            most * tokens,
            _additive(visible),
            _unused(batch, written),
            hollow=_hollow(visible),
        )
    # Padding reads the first page of the longest: it is full, so what is masked is at least finite.
    longest = pages.index(most)
    real = column < torch.tensor(pages, device=device).unsqueeze(1) + first
    blocks = torch.where(real, blocks, blocks[longest, 0])
    end = torch.tensor(lengths, device=device).unsqueeze(1)
    visible = physical < end
    if window:
        visible &= physical >= end - window
    unused = [
        index * most * tokens + place
        for index, (length, count) in enumerate(zip(lengths, pages, strict=True))
        for place in range((count - 1) * tokens + (length - 1) % tokens + 1, count * tokens)
    ]
    return Segment(
        rows,
        len(sequences),
        blocks.flatten(),
        most * tokens,
        _additive(visible[:, None, None]),
        torch.tensor(unused, dtype=torch.int64, device=device) if unused else None,
    )


def _prefill(batch: AttentionBatch, window: int, sequence: int) -> Segment:
    """The rows of one sequence, after whatever prefix it has."""
    row_first, row_end = batch.starts_list[sequence : sequence + 2]
    length, count, tokens = batch.lengths_list[sequence], row_end - row_first, batch.block_tokens
    block_first = _first_block(batch, window, length - count)
    table = batch.tables[sequence, block_first : -(-length // tokens)].long()
    offset = block_first * tokens
    rows = slice(row_first, row_end)
    if _uniform(batch):
        tiles = tuple(
            _tile(length, offset, window, start, min(start + TILE_ROWS, count), count, table.device)
            for start in range(0, count, TILE_ROWS)
        )
        return Segment(rows, 1, table, length - offset, tiles=tiles)
    chosen = torch.tensor([sequence], device=table.device)
    physical = torch.arange(length, device=table.device).unsqueeze(0)
    written = _written(batch, chosen, physical, table.unsqueeze(0))
    limit = _head_lengths(batch, chosen).unsqueeze(-1) - count  # [1, H, 1]
    limit = limit + torch.arange(count, device=table.device)  # last place each row sees
    visible = _visible(batch, window, chosen, written, batch.positions[rows].unsqueeze(0))
    visible = visible.expand(-1, limit.shape[1], -1, -1) & (
        physical[:, None, None] <= limit.unsqueeze(-1)
    )
    mask = _additive(visible).transpose(0, 1)  # [1, H, rows, keys] -> [H, 1, rows, keys]
    tiles = tuple(
        Tile(start, min(start + TILE_ROWS, count), 0, length, mask[:, :, start : start + TILE_ROWS])
        for start in range(0, count, TILE_ROWS)
    )
    unused, hollow = _unused(batch, written), _hollow(visible)
    return Segment(rows, 1, table.clamp(min=0), length, None, unused, tiles, hollow)


def _tile(
    length: int, offset: int, window: int, start: int, end: int, count: int, device: torch.device
) -> Tile:
    """Rows [start, end) of the `count` last of `length`; keys are gathered from `offset` on."""
    position = torch.arange(length - count + start, length - count + end, device=device)
    first = max(offset, length - count + start - window + 1) if window else offset
    physical = torch.arange(first, length - count + end, device=device)
    age = position.unsqueeze(1) - physical
    visible = (age >= 0) & (age < window) if window else age >= 0
    return Tile(
        start, end, first - offset, length - count + end - offset, _additive(visible)[None, None]
    )


def _additive(visible: torch.Tensor) -> torch.Tensor:
    mask = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device)
    return mask.masked_fill_(~visible, -torch.inf)


def _hollow(visible: torch.Tensor) -> bool:
    return not bool(visible.any(-1).all())


def _unused(batch: AttentionBatch, written: torch.Tensor) -> torch.Tensor:
    """bool [1 | Hkv, C, keys, 1] from `written` [C, 1 | Hkv, keys]."""
    return (~written).transpose(0, 1).unsqueeze(-1)


def _head_lengths(batch: AttentionBatch, chosen: torch.Tensor) -> torch.Tensor:
    lengths = batch.lengths.index_select(0, chosen).long()
    return lengths if lengths.dim() == 2 else lengths.unsqueeze(1)  # [C, 1 | Hkv]


def _written(
    batch: AttentionBatch, chosen: torch.Tensor, physical: torch.Tensor, blocks: torch.Tensor
) -> torch.Tensor:
    """bool [C, 1 | Hkv, keys]: places that hold a key of the sequence."""
    lengths = _head_lengths(batch, chosen)
    present = (blocks >= 0).repeat_interleave(batch.block_tokens, 1)[:, : physical.shape[1]]
    return (physical.unsqueeze(1) < lengths.unsqueeze(-1)) & present.unsqueeze(1)


def _visible(
    batch: AttentionBatch,
    window: int,
    chosen: torch.Tensor,
    written: torch.Tensor,
    query: torch.Tensor,
) -> torch.Tensor:
    """bool [C, 1 | Hkv, rows, keys] by presence and window; query int64 [C, rows] positions."""
    keys = written.shape[-1]
    seen = written.unsqueeze(2)
    if window == 0:
        return seen.expand(-1, -1, query.shape[1], -1)
    if batch.kv_positions is None:
        logical = torch.arange(keys, device=written.device).expand(written.shape[0], 1, keys)
    else:
        logical = batch.kv_positions.index_select(0, chosen)
        logical = logical if logical.dim() == 3 else logical.unsqueeze(1)
        logical = torch.nn.functional.pad(logical, (0, max(0, keys - logical.shape[2])))
        logical = logical[..., :keys]
    age = query[:, None, :, None] - logical.unsqueeze(2)
    return seen & (age < window)
