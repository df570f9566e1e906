"""What pages cost: attention over them against the same attention over contiguous memory; and cold
codecs, beside a copy.

`python -m kernels.bench [--json FILE] [--rounds N] [--only PART]`. One layer's call, the layers of
a small pool taken in turn so that none finds its keys in the cache; shapes of SmolLM2-135M, bf16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.backends import backend_for
from kernels.batch import build_batch
from kernels.codecs.cold import TurboCold
from kernels.cold import ColdCodec, Fp8Cold
from kernels.layout import LayerPages, PageLayout
from kernels.native.build import NativeUnavailable, load_library
from seams.bench import Report, Row, alternate, median

LAYERS, BLOCK_TOKENS = 4, 16
QUERY_HEADS, KV_HEADS, DIM = 9, 3, 64
SPEC = AttentionSpec(QUERY_HEADS, KV_HEADS, DIM, DIM, DIM**-0.5)
CALL_S_MIN = 0.02  # a sample is the mean of as many calls as fill this


class Shape:
    """`sequences` of `length` positions each, the last `rows` of them new."""

    def __init__(self, sequences: int, length: int, rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sequences, self.length, self.rows = sequences, length, rows
        layout = PageLayout(LAYERS, KV_HEADS, BLOCK_TOKENS, DIM, DIM, "bf16")
        pages = -(-length // BLOCK_TOKENS)
        free = torch.randperm(sequences * pages, generator=generator).tolist()
        self.tables = [free[s * pages : (s + 1) * pages] for s in range(sequences)]
        pool = torch.zeros(len(free), layout.block_bytes, dtype=torch.uint8)
        self.pages: list[LayerPages] = layout.pages(pool)
        rows_shape = (sequences * length, KV_HEADS, DIM)
        place = torch.arange(length)
        slots = torch.cat(
            [torch.tensor(t)[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS
             for t in self.tables]
        )  # fmt: skip
        for loader in self.pages:
            keys, values = torch.randn(2, *rows_shape, generator=generator).bfloat16()
            loader.write(slots, keys, values)
        new = sequences * rows
        self.q = torch.randn(new, QUERY_HEADS, DIM, generator=generator).bfloat16()
        self.kv = torch.randn(2, new, KV_HEADS, DIM, generator=generator).bfloat16()
        self.batch = self.build()

    def build(self) -> AttentionBatch:
        """The step's tensors, from the lists a scheduler has."""
        starts = [s * self.rows for s in range(self.sequences + 1)]
        positions = list(range(self.length - self.rows, self.length))
        slots = [
            table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS
            for table in self.tables
            for p in positions
        ]
        return build_batch(
            starts,
            [self.length] * self.sequences,
            positions * self.sequences,
            self.tables,
            slots,
            BLOCK_TOKENS,
            "cpu",
        )

    def contiguous(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """q [S, Hkv, group * rows, D] and keys, values [S, Hkv, length, D] of each layer."""
        q = self.q.view(self.sequences, self.rows, KV_HEADS, -1, DIM)
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3)
        generator = torch.Generator().manual_seed(1)
        shape = (2, self.sequences, KV_HEADS, self.length, DIM)
        layers = [torch.randn(shape, generator=generator).bfloat16() for _ in range(LAYERS)]
        return [(q, layer[0], layer[1]) for layer in layers]


def _timer(
    calls: list[Callable[[], object]], clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Microseconds of one call, the mean over whole rounds of `calls`."""

    def measure() -> float:
        count, began = 0, clock()
        while count == 0 or clock() - began < CALL_S_MIN:
            for call in calls:
                call()
            count += len(calls)
        return (clock() - began) / count * 1e6

    return measure


def _paged(shape: Shape) -> list[Callable[[], object]]:
    backend = backend_for("cpu")
    return [
        lambda pages=pages: backend.attend(shape.q, pages, shape.batch, SPEC)  # type: ignore[misc]
        for pages in shape.pages
    ]


def _contiguous(shape: Shape) -> list[Callable[[], object]]:
    mask = None
    if shape.rows > 1:
        seen = torch.ones(shape.rows, shape.length, dtype=torch.bool)
        seen = seen.tril(shape.length - shape.rows).repeat(QUERY_HEADS // KV_HEADS, 1)
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    attend = F.scaled_dot_product_attention
    return [
        lambda q=q, k=k, v=v: attend(q, k, v, attn_mask=mask)  # type: ignore[misc]
        for q, k, v in shape.contiguous()
    ]


def attention_rows(rounds: int) -> Iterator[Row]:
    """Paged against contiguous attention."""
    shapes = [(s, length, 1) for length in (512, 2000) for s in (1, 8, 32)]
    shapes += [(1, 512, 512), (1, 2000, 512)]
    for sequences, length, rows in shapes:
        shape = Shape(sequences, length, rows)
        samples = alternate(
            {"paged": _timer(_paged(shape)), "contiguous": _timer(_contiguous(shape))}, rounds
        )
        kind = "decode" if rows == 1 else f"prefill{rows}"
        yield Row(
            f"{kind}/batch{sequences}/length{length}",
            median(samples["paged"]),
            "us",
            rounds,
            "contiguous sdpa",
            median(samples["contiguous"]),
        )


def step_rows(rounds: int) -> Iterator[Row]:
    """What a step pays beside attention: writes per layer, the batch and its plan once."""
    backend = backend_for("cpu")
    for sequences in (1, 8, 32):
        shape = Shape(sequences, 512, 1)

        def write(pages: LayerPages, shape: Shape = shape) -> None:
            pages.write(shape.batch.slots, shape.kv[0], shape.kv[1])

        def first_layer(shape: Shape = shape) -> object:
            return backend.attend(shape.q, shape.pages[0], shape.build(), SPEC)

        writes: list[Callable[[], object]] = [
            lambda p=pages, w=write: w(p)  # type: ignore[misc]
            for pages in shape.pages
        ]
        samples = alternate(
            {
                "write": _timer(writes),
                "first": _timer([first_layer]),
                "later": _timer(_paged(shape)),
            },
            rounds,
        )
        yield Row(f"write/batch{sequences}", median(samples["write"]), "us", rounds)
        yield Row(
            f"batch and first layer/batch{sequences}",
            median(samples["first"]),
            "us",
            rounds,
            "a later layer",
            median(samples["later"]),
        )


def cold_rows(rounds: int) -> Iterator[Row]:
    """Cold codecs: CPU time of a block, all threads together, beside a copy's."""
    with suppress(NativeUnavailable):
        load_library()
    layout = PageLayout(30, KV_HEADS, BLOCK_TOKENS, DIM, DIM, "bf16")
    numbers = torch.randn(layout.block_bytes // 2, generator=torch.Generator().manual_seed(2))
    block = memoryview(bytearray(numbers.bfloat16().view(torch.uint8).numpy().tobytes()))
    copy = _timer([lambda: bytearray(block)], time.process_time)
    codecs: dict[str, ColdCodec] = {
        "fp8": Fp8Cold(layout),
        "turboquant4": TurboCold(layout),
        "turboquant4 by torch": TurboCold(layout, compiled=False),
    }
    for name, codec in codecs.items():
        encoded, decoded = (
            memoryview(bytearray(size)) for size in (codec.encoded_bytes, layout.block_bytes)
        )
        codec.encode(block, encoded)
        ways = {
            "encode": partial(codec.encode, block, encoded),
            "decode": partial(codec.decode, encoded, decoded),
        }
        timers = {way: _timer([call], time.process_time) for way, call in ways.items()}
        samples = alternate({**timers, "copy": copy}, rounds)
        for way in ways:
            us, beside = median(samples[way]), median(samples["copy"])
            yield Row(f"cold/{name}/{way}", us, "us", rounds, "copy", beside)
        yield Row(f"cold/{name}/bytes", codec.encoded_bytes, "bytes", 1, "bf16", layout.block_bytes)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    parser.add_argument("--only", default="", help="attention, step or cold")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each row")
    arguments = parser.parse_args()
    report = Report()
    parts = {"attention": attention_rows, "step": step_rows, "cold": cold_rows}
    for name, measured in parts.items():
        if arguments.only in ("", name):
            for row in measured(arguments.rounds):
                report.add(row)
    report.show(arguments.json)


if __name__ == "__main__":
    main()
