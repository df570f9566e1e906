"""What the server says of combinations of codec and retention that make no sense, in its own words.
Measures nothing."""

from __future__ import annotations

from collections.abc import Callable

from seams.errors import BanyanError
from worker.compression.base import PLAIN, Findings, Settings
from worker.engine.retention.options import Options
from worker.service.advice import pruning_warning
from worker.service.settings import check_kv_codec, check_oscar

SERVED = "served"
SCORED, RECENT = "triattention", "streaming"
TWO_POLICIES = "streaming:window=64+triattention:budget=64"


def measure_combinations(settings: Settings, found: Findings) -> None:
    """Each codec with a policy that scores keys and with one that does not, two policies on one
    request, two codecs on one block."""
    for codec in (PLAIN, *settings.codecs):
        for policy in (SCORED, RECENT):
            found.combinations.append((f"{codec} with {policy}", _verdict(codec, policy)))
    found.combinations.append((f"a request with {TWO_POLICIES}", _said(_two_policies)))
    found.combinations.append(("fp8 on the device and fp8 below it", _said(_two_codecs)))


def _verdict(codec: str, policy: str) -> str:
    refused = _said(lambda: check_oscar(codec, "a calibration", policy))
    if refused != SERVED:
        return refused
    words = pruning_warning(codec, policy)
    return f"warned: {words}" if words else SERVED


def _two_policies() -> None:
    Options(TWO_POLICIES)


def _two_codecs() -> None:
    check_kv_codec("fp8", "fp8", batch_invariant=False)


def _said(asked: Callable[[], None]) -> str:
    try:
        asked()
    except BanyanError as error:
        return f"refused: {error.message}"
    return SERVED
