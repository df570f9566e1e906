"""Recorded traffic as workloads. It knows no replica, no router and no text.

What a trace calls a block is shared by all that name it; where it tells lengths only, prompts share
nothing.
"""

from __future__ import annotations

from pathlib import Path

from seams import traces
from seams.errors import InvalidRequest
from simulate.workload import Cells, Grain, SimRequest, Workload, request_of


def read_trace(path: Path, grain: Grain, requests_max: int | None = None) -> Workload:
    """The first requests of a trace (seams/traces.py), by when they came; each puts out a token at
    least. Raises InvalidRequest, which names the line."""
    if grain.block_tokens != traces.HASHED_TOKENS:
        raise InvalidRequest(f"The trace's blocks have {traces.HASHED_TOKENS} tokens.")
    own = Cells(grain)

    def request(number: int, recorded: traces.Recorded) -> SimRequest:
        tokens, per = recorded.input_tokens, grain.block_cells
        if recorded.hash_ids:
            named = [hash_id * per + at for hash_id in recorded.hash_ids for at in range(per)]
            cells = named[: grain.cells(tokens)]
        else:
            cells = own.take(tokens)
        output_tokens = max(1, recorded.output_tokens)
        return request_of(grain, number, recorded.at_s, cells, tokens, output_tokens)

    found = traces.read_trace(path, requests_max)
    requests = tuple(request(number, recorded) for number, recorded in enumerate(found))
    return Workload(grain, requests, max(r.output_tokens for r in requests))
