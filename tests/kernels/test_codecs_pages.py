"""Pages of codes: bytes, writing and gathering, and attention through the one interface."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, check, compare, make_case
from codec_cases import NAMES, vector_codecs, vectors
from coded_pages import coded_case

from kernels.backends import backend_for
from kernels.codecs.base import LayerCodec
from kernels.codecs.choose import codec_id, make_codec
from kernels.codecs.names import CodecName, parse_codec
from kernels.codecs.pages import CodecAttention, CodecLayout
from kernels.codecs.turboquant import TurboVectors
from kernels.layout import PageLayout
from kernels.paged import PagedAttention

# Keys and values of one token and KV head with 128 numbers each, and what they are as bf16.
TOKEN_BYTES = {
    "fp8": 256,
    "turboquant": 132,
    "turboquant:k4v4": 132,
    "turboquant:k3v3": 100,
    "turboquant:k2v2": 68,
    "turboquant:k1v1": 36,
    "turboquant:k3v4": 116,
    "turboquant:k8v4": 194,
}
# layers, KV heads, dim -> KiB per token of the whole model: bf16, TurboQuant's 4 and 3 bits.
MODELS = {
    "Llama-3.1-8B": ((32, 8, 128), 128, 33, 25),
    "Qwen3-8B": ((36, 8, 128), 144, 37.125, 28.125),
    "Llama-3.2-1B": ((16, 8, 64), 32, 8.5, 6.5),
}


def chosen(text: str) -> CodecName:
    name = parse_codec(text)
    assert name is not None
    return name


@pytest.mark.parametrize("text", TOKEN_BYTES)
def test_bytes_of_a_token(text: str) -> None:
    codec = make_codec(chosen(text), 3, 128, torch.bfloat16)
    assert codec is not None and codec.token_local and codec.calibration == ""
    assert codec.layers[1].token_bytes == TOKEN_BYTES[text]
    assert codec.bytes_per_block(1, 16, 8) == 16 * 8 * TOKEN_BYTES[text]
    layout = CodecLayout(codec.layers, 8, 16)
    assert layout.block_bytes == 3 * 16 * 8 * TOKEN_BYTES[text]


@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_whole_models(model: str) -> None:
    (layers, heads, dim), plain, four, three = MODELS[model]
    assert PageLayout(layers, heads, 16, dim, dim, "bf16").block_bytes == 16 * 1024 * plain
    for bits, expected in ((4, four), (3, three)):
        name = CodecName("turboquant", bits, bits)
        codec = make_codec(name, layers, dim, torch.bfloat16)
        assert codec is not None
        assert codec.bytes_per_token(heads) == 1024 * expected


def test_boundary_layers_stay_in_the_models_dtype() -> None:
    codec = make_codec(chosen("turboquant:k4v4,boundary=2"), 6, 128, torch.bfloat16)
    assert codec is not None
    assert [layer.token_bytes for layer in codec.layers] == [512, 512, 132, 132, 512, 512]
    assert "-b2" in codec.id
    everything = make_codec(chosen("turboquant:k4v4,boundary=9"), 6, 128, torch.bfloat16)
    assert everything is not None
    assert {layer.token_bytes for layer in everything.layers} == {512}


def test_names() -> None:
    assert parse_codec("turboquant") == CodecName("turboquant", 4, 4)
    assert parse_codec("turboquant:k8v3,boundary=1") == CodecName("turboquant", 8, 3, 1)
    assert parse_codec("turboquant,boundary=2") == CodecName("turboquant", 4, 4, 2)
    for wrong in (
        "",
        "fp4",
        "turboquant:k5v4",
        "turboquant:k4v8",
        "turboquant:k4",
        "fp8,boundary=1",
        "oscar:",
        "oscar:sinks=1,sinks=2",
        "oscar:window=0",
        "oscar:window=70000",
        "oscar,boundary=1",
        "oscarine",
    ):
        assert parse_codec(wrong) is None
    for text, sinks, window in (
        ("oscar", 64, 256),
        ("oscar:sinks=0", 0, 256),
        ("oscar:window=32,sinks=16", 16, 32),
    ):
        assert parse_codec(text) == CodecName("oscar", 2, 2, 0, sinks, window)
    texts = ["fp8", "turboquant", "turboquant:k3v4", "turboquant:k4v3", "turboquant,boundary=1"]
    assert len({codec_id(chosen(text)) for text in texts}) == len(texts)
    assert make_codec(chosen("model"), 2, 64, torch.bfloat16) is None


def layer_codec(name: str, case: Case) -> LayerCodec:
    """Heads of a case are as many as it has, so codecs by head are out where they are not two."""
    return LayerCodec(vector_codecs(case.spec.qk_dim)[name], vector_codecs(case.spec.v_dim)[name])


@pytest.mark.parametrize("name", [n for n in NAMES if "cold" not in n])
def test_attention_is_that_over_what_the_codes_stand_for(name: str) -> None:
    """Mixed batches, windows, caps, sinks, per-head lengths; NaN in every place nobody wrote.
    Beside the same backend over pages of numbers, which has the reference for its yardstick."""
    ran = 0
    for seed in range(12):
        case = make_case(seed, "fp32")
        by_head = name in ("oscar", "fp8-scaled")
        powers = all(d & (d - 1) == 0 for d in (case.spec.qk_dim, case.spec.v_dim))
        if (by_head and case.spec.kv_heads != 2) or (name == "oscar" and not powers):
            continue
        pages, expected = coded_case(case, layer_codec(name, case))
        exact = PagedAttention().attend(case.q, expected.pages, case.batch, case.spec, True)
        backend = CodecAttention(backend_for("cpu"))
        got = backend.attend(case.q, pages, case.batch, case.spec, want_lse=True)
        assert got.lse is not None and exact.lse is not None
        assert torch.allclose(got.out, exact.out, atol=2e-4), f"seed {seed}"
        assert torch.allclose(got.lse, exact.lse, atol=1e-3), f"seed {seed}"
        ran += 1
    assert ran > 1


def test_the_reference_agrees() -> None:
    for seed in (2, 4):
        case = make_case(seed, "fp32", pure_decode=True)
        pages, expected = coded_case(case, layer_codec("turbo4", case))
        got = CodecAttention(PagedAttention()).attend(case.q, pages, case.batch, case.spec, True)
        errors = compare(expected, got)
        assert errors["lse"] <= 1e-4 and errors["out"] <= 1e-4, f"seed {seed}: {errors}"


def test_pages_of_the_models_dtype_go_through_the_same_backend() -> None:
    for seed in (1, 2):
        case = make_case(seed, "fp32")
        backend = CodecAttention(PagedAttention())
        got = backend.attend(case.q, case.pages, case.batch, case.spec, want_lse=True)
        check(compare(case, got), "fp32", seed)


@pytest.mark.parametrize("by_head", [False, True])
def test_a_row_is_written_where_it_belongs_and_nowhere_else(by_head: bool) -> None:
    heads, tokens, dim = 2, 4, 32
    codec = LayerCodec(TurboVectors(dim, 3), TurboVectors(dim, 2))
    layout = CodecLayout((codec, codec), heads, tokens)
    pool = torch.full((5, layout.block_bytes), 255, dtype=torch.uint8)
    before = pool.clone()
    pages = layout.pages(pool)[1]
    keys, values = (vectors(seed, 3, dim).transpose(0, 1) for seed in (1, 2))
    slots = torch.tensor([7, 16, 2])
    given = torch.stack((slots, torch.tensor([1, 3, 19])), 1) if by_head else slots
    pages.write(given, keys, values)
    found_keys, found_values = pages.gather(torch.arange(5))
    changed = pool != before
    assert int(changed.any(0).sum()) and not changed[:, : layout.page_bytes(0)].any()
    for row in range(3):
        for head in range(heads):
            block, offset = divmod(int(given[row, head] if by_head else slots[row]), tokens)
            for codec_of, found, source in (
                (codec.keys, found_keys, keys),
                (codec.values, found_values, values),
            ):
                alone = codec_of.decode(codec_of.encode(source[row, head].view(1, 1, dim)))
                assert torch.equal(found[block, head, offset], alone.view(dim))
    written = {int(s) for s in given.flatten()}
    left = [s for s in range(5 * tokens) if s not in written]
    blocks, offsets = torch.tensor(left) // tokens, torch.tensor(left) % tokens
    assert bool(found_keys[blocks, :, offsets].isnan().all())


def test_unequal_page_sizes_add_up() -> None:
    coded_layer = LayerCodec(TurboVectors(24, 3), TurboVectors(24, 1))
    layout = CodecLayout((coded_layer, coded_layer), 1, 1)
    assert layout.page_bytes(0) == 16  # 11 + 5 bytes, a multiple of four
    assert layout.block_bytes == 32
