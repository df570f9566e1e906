"""An attention problem in codes: pages that hold the codes of a case's keys and values, and the
same case with what the codes stand for."""

from __future__ import annotations

from dataclasses import replace

import torch
from attention_cases import Case
from codec_cases import HEADS, vector_codecs

from kernels.codecs.base import LayerCodec
from kernels.codecs.model_dtype import PlainVectors
from kernels.codecs.pages import CodecLayout, CodecPages
from kernels.layout import LayerPages

# name -> how keys and how values are stored
PAIRS = {
    "k4v4": ("turbo4", "turbo4"),
    "k3v2": ("turbo3", "turbo2"),
    "k8v1": ("fp8", "turbo1"),
    "k2v3": ("turbo2", "turbo3"),
    "fp8": ("fp8-scaled", "fp8-scaled"),
    "minmax": ("turbo4", "uniform4"),
    "oscar": ("oscar", "oscar"),
}


def decodable(case: Case) -> dict[str, LayerCodec]:
    """The pairs that fit the case's widths and number of KV heads."""
    spec, device = case.spec, str(case.q.device)
    keys, values = vector_codecs(spec.qk_dim, device), vector_codecs(spec.v_dim, device)
    found = {}
    for name, (key, value) in PAIRS.items():
        if key in keys and value in values:
            codec = LayerCodec(keys[key], values[value])
            if {codec.keys.heads, codec.values.heads} <= {1, spec.kv_heads}:
                found[name] = codec
    assert HEADS == 2 and "k4v4" in found
    return found


def coded_case(case: Case, codec: LayerCodec) -> tuple[CodecPages | LayerPages, Case]:
    """Pages of the case in codes, poisoned where nothing is, and the case with decoded pages."""
    plain = case.pages.layout
    edge = LayerCodec(PlainVectors(8, torch.float32), PlainVectors(8, torch.float32))
    layout = CodecLayout((edge, codec, edge), plain.kv_heads, plain.block_tokens)
    blocks, device = len(case.pages.keys), case.q.device
    poison = torch.full((blocks, layout.block_bytes), 255, dtype=torch.uint8, device=device)
    pages = layout.pages(poison)[1]
    decoded_layout = replace(plain, dtype="fp32")
    pool = torch.zeros(blocks, decoded_layout.block_bytes, dtype=torch.uint8, device=device)
    decoded = decoded_layout.pages(pool)[1]
    for to, into, source, how in (
        (pages.keys, decoded.keys, case.pages.keys, codec.keys),
        (pages.values, decoded.values, case.pages.values, codec.values),
    ):
        codes = how.encode(source)
        to.copy_(codes.view(to.dtype))
        into.copy_(how.turn_back(how.decode(codes)))
    return pages, replace(case, pages=decoded)
