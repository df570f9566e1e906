"""What serving a request on a replica would cost, in seconds, term by term; pure functions.

It knows numbers about replicas, never the replicas themselves. The sum is the predicted time until
the request is done, plus what it takes from others: no gate over the whole fleet, no weights
between unlike things. Terms, in order:

booked_prefill       prefill that is already promised there: between what comes first and all of it
miss_prefill         computing the tokens that no tier of the replica holds
tier_load            bringing blocks from host, disk or the shared tier, or computing them if faster
rtt                  the measured overhead of a request: the wire, the queue's hand-over
interference         what the own prefill takes from others: from each prompt in line that it passes
                     and, far less, from every sequence that decodes beside it
later                what it takes from those who come while lines are worked off, wherever they go:
                     so a hit is worth more under load, and not for one that is hot beside idle ones
output               a share of the expected tokens' time in the batch it would join: nobody waits
                     for a next token as for the first
memory               evicting cached blocks (a share of them is missed later), preempting others
session              leaving the replica that served the session: its last, partial block
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from seams.rng import Rng

TERMS = (
    "booked_prefill",
    "miss_prefill",
    "tier_load",
    "rtt",
    "interference",
    "later",
    "output",
    "memory",
    "session",
)
_OUTPUT = TERMS.index("output")
# Shares of the own prefill. A longer prompt waits for all of it; who decodes is slowed down within
# a bound that the replica keeps, and waits for no first token (banyan simulate, docs/log.md).
DELAYS_PROMPT = 1.0
DELAYS_DECODE = 0.02
DELAYS_LATER = 3.5  # as many come as are in line now, for as long as lines are: hence squared
OUTPUT_SHARE = 0.1  # of its time: more, and the noise of measured steps outweighs prompts
EVICTED_REUSE = 0.1  # share of evicted blocks that would have been hit again
TIE_SHARE = 0.005  # costs this close, output apart, are equal; ties are drawn
TIE_S = 1e-5


@dataclass(slots=True)
class Candidate:
    """One replica as the request finds it. Tokens held are counted from the prompt's start, each
    tier adding to the faster ones: device <= host <= disk <= shared.
    """

    replica: str
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    shared_tokens: int
    booked_prefill_s: float
    prefill_s_per_token: float
    overhead_s: float
    decoding: int  # sequences that are past their prefill
    passed: int  # prompts in line there that this one would pass
    prompts: int  # in line there
    step_s: float  # with this request in the batch
    blocks_needed: int  # beyond those it already holds on the device
    blocks_free: int  # less what is booked; may be negative
    blocks_evictable: int  # cached, not needed by this request
    block_tokens: int
    host_s_per_token: float
    disk_s_per_token: float
    shared_s_per_token: float
    off_session: bool  # the session was last served elsewhere


class Cost(NamedTuple):
    """The prediction for one candidate; `terms` in the order of TERMS, in seconds."""

    replica: str
    total_s: float
    terms: tuple[float, ...]
    matched_tokens: int


def predict(at: Candidate, tokens: int, expected_output: float, line: float) -> Cost:
    """Price `tokens` of prompt (and what it emitted before) and the expected output; `line`
    prompts are in line at a candidate, usually."""
    rate = at.prefill_s_per_token
    usable = tokens - 1  # the last token is always computed
    device = min(at.device_tokens, usable)
    held = min(max(at.shared_tokens, device), usable)
    miss_s = (tokens - held) * rate
    load_s = _load_s(at, device, usable) if held > device else 0.0
    own_s = miss_s + load_s
    short = at.blocks_needed - at.blocks_free
    evicted = max(0, min(short, at.blocks_evictable))
    preempted = max(0, short - at.blocks_evictable) if short > 0 else 0
    terms = (
        at.booked_prefill_s,
        miss_s,
        load_s,
        at.overhead_s,
        own_s * (DELAYS_PROMPT * at.passed + DELAYS_DECODE * (at.decoding + 1)),
        own_s * DELAYS_LATER * line * (1.0 + line),
        OUTPUT_SHARE * expected_output * at.step_s,
        (evicted * EVICTED_REUSE + preempted) * at.block_tokens * rate,
        at.block_tokens * rate if at.off_session else 0.0,
    )
    return Cost(at.replica, sum(terms), terms, held)


def usual_line(lines: Sequence[int]) -> float:
    """Prompts in line at a candidate: the mean, each counted up to one more than the median, so
    that one long line among short ones does not pass for a busy fleet."""
    most = sorted(lines)[(len(lines) - 1) // 2] + 1
    return sum([min(line, most) for line in lines]) / len(lines)


def _load_s(at: Candidate, device: int, usable: int) -> float:
    total, start = 0.0, device
    for end, seconds in (
        (at.host_tokens, at.host_s_per_token),
        (at.disk_tokens, at.disk_s_per_token),
        (at.shared_tokens, at.shared_s_per_token),
    ):
        end = min(end, usable)
        if end > start:
            total += (end - start) * min(seconds, at.prefill_s_per_token)
            start = end
    return total


def ranked(costs: Sequence[Cost], rng: Rng) -> list[Cost]:
    """Cheapest first; the first is drawn among those that cost the same."""
    order = sorted(costs, key=lambda cost: cost.total_s)
    best = order[0]
    alike = best.total_s - best.terms[_OUTPUT]  # nearly common to all, and large: no measure
    limit = best.total_s + TIE_SHARE * alike + TIE_S
    equal = sum(1 for cost in order if cost.total_s <= limit)
    if equal > 1:
        picked = order.pop(int(rng.random() * equal))
        order.insert(0, picked)
    return order


def reason(picked: Cost, costs: Sequence[Cost], tokens: int) -> str:
    """One sentence: why `picked`, and which term spoke against the longest holder if it is not."""
    longest = max(costs, key=lambda cost: (cost.matched_tokens, cost.replica == picked.replica))
    of = f"of {tokens} tokens"
    if longest.matched_tokens == 0:
        return f"{picked.replica} costs least, {picked.total_s:.3g} s; nobody holds any {of}."
    if picked.matched_tokens == longest.matched_tokens:
        return (
            f"{picked.replica} costs least, {picked.total_s:.3g} s, and holds the most, "
            f"{picked.matched_tokens} {of}."
        )
    extra = [theirs - ours for theirs, ours in zip(longest.terms, picked.terms, strict=True)]
    decisive = max(range(len(TERMS)), key=extra.__getitem__)
    if longest.total_s <= picked.total_s or extra[decisive] <= 0:
        return (
            f"{picked.replica} was drawn among equals at {picked.total_s:.3g} s, passing over "
            f"{longest.replica}, which holds {longest.matched_tokens} {of}."
        )
    return (
        f"{picked.replica} costs least, {picked.total_s:.3g} s, with {picked.matched_tokens} {of}; "
        f"{longest.replica} holds {longest.matched_tokens} but was passed over for its "
        f"{TERMS[decisive]}, {extra[decisive]:.3g} s more."
    )
