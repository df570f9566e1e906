"""A tiny warm-up: first touch of weights and kernels, and the priors that the hello states.

Runs through the same path as a router's requests, with tokens that no cache keeps. It knows no
network.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from statistics import median

from banyan.v1 import internal_pb2
from seams.errors import InternalError, LaunchError
from worker.engine.messages import EngineRequest
from worker.engine.sampling import SamplingParams
from worker.models.base import ModelSpec
from worker.service.dispatch import Dispatcher, FrameStream

WARMUP_S_MAX = 300.0  # of one run; a model slower than that cannot serve
PREFILL_TOKENS = 128
PREFILL_AGAIN_S = 0.1  # a prefill quicker than this is measured again at the full step size
DECODE_TOKENS = 8
BATCH = 4


@dataclass(frozen=True)
class _Frames:
    """When a run was submitted, and for each of its frames when it came and how many sequences."""

    submitted_s: float
    seen: list[tuple[float, int]]

    @property
    def first_s(self) -> float:
        return self.seen[0][0] - self.submitted_s

    def step_s(self, sequences: int) -> float:
        """Median time between frames that both carry `sequences`; 0 if there are none."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        gaps = [b[0] - a[0] for a, b in pairs if a[1] == b[1] == sequences]
        return median(gaps) if gaps else 0.0


def _request(engine_id: str, prompt_tokens: int, output_tokens: int, vocab: int) -> EngineRequest:
    return EngineRequest(
        request_id=engine_id,
        token_ids=tuple((i * 7919 + 13) % vocab for i in range(prompt_tokens)),
        prompt_tokens=prompt_tokens,
        sampling=SamplingParams(seed=0, max_tokens=output_tokens, ignore_eos=True),
        no_cache=True,
    )


async def _run(stream: FrameStream, requests: list[EngineRequest]) -> _Frames:
    open_ids = {request.request_id for request in requests}
    frames = _Frames(time.monotonic(), [])
    for request in requests:
        wire_id = request.request_id
        stream.submit(wire_id, replace(request, request_id=stream.engine_id(wire_id)))
    while open_ids:
        frame = await stream.next()
        assert frame is not None, "the warm-up's stream is ended by nobody else"
        frames.seen.append((time.monotonic(), len(frame.emissions)))
        for emission in frame.emissions:
            if emission.HasField("error"):
                raise LaunchError(f"The warm-up request failed: {emission.error.message}")
            if emission.last:
                open_ids.remove(emission.request_id)
    return frames


async def measure_priors(
    dispatcher: Dispatcher, spec: ModelSpec, blocks: tuple[int, ...], step_tokens_max: int
) -> internal_pb2.Priors:
    """Warm the engine up and measure. Seconds. Raises LaunchError or InternalError.

    Sizes shrink with the context and the pool, so that any replica that can serve can warm up.
    """
    room = min(spec.context_tokens, min(blocks) * spec.block_tokens)
    output = max(1, min(DECODE_TOKENS, room // 4))
    stream = dispatcher.open()

    async def run(name: str, prompt_tokens: int, sequences: int = 1) -> _Frames:
        size = max(1, min(prompt_tokens, room // 2 - output))
        requests = [
            _request(f"warm-up {name} {i}", size, output, spec.vocab_tokens)
            for i in range(sequences)
        ]
        async with asyncio.timeout(WARMUP_S_MAX):
            return await _run(stream, requests)

    try:
        await run("first", 1)
        alone = await run("alone", PREFILL_TOKENS)
        size = max(1, min(PREFILL_TOKENS, room // 2 - output))
        prefill_s = alone.first_s / size
        if alone.first_s < PREFILL_AGAIN_S and step_tokens_max > PREFILL_TOKENS:
            size = max(1, min(step_tokens_max, room // 2 - output))
            prefill_s = (await run("again", step_tokens_max)).first_s / size
        step_s = alone.step_s(1)
        more_s = 0.0
        if room >= 2 * BATCH * (spec.block_tokens + output):
            batch_s = (await run("batch", 1, BATCH)).step_s(BATCH)
            more_s = max(0.0, batch_s - step_s) / (BATCH - 1) if batch_s else 0.0
    except TimeoutError:
        raise InternalError("The model did not finish its warm-up in time.") from None
    finally:
        stream.end()
    return internal_pb2.Priors(
        prefill_s_per_token=prefill_s, step_s=step_s, step_s_per_sequence=more_s
    )
