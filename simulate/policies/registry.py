"""All policies by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from seams.errors import InvalidRequest
from simulate.policies.base import MakePolicy, Place, Policy
from simulate.policies.cost import CostPolicy, Wrong
from simulate.policies.dynamo import Dynamo, DynamoPredicting
from simulate.policies.llmd import LlmdFilter, LlmdScorer
from simulate.policies.plain import LeastLoaded, RoundRobin
from simulate.policies.preble import Gorgo, Preble
from simulate.policies.sglang import Sglang, SmgEvents

OURS = "cost"

POLICIES: dict[str, Callable[[Place], Policy]] = {
    OURS: CostPolicy,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "sglang": Sglang,
    "smg_events": SmgEvents,
    "dynamo": Dynamo,
    "dynamo_predict": DynamoPredicting,
    "llmd_score": LlmdScorer,
    "llmd_filter": LlmdFilter,
    "preble": Preble,
    "gorgo": Gorgo,
}


def policy_of(name: str, wrong: Wrong | None = None) -> MakePolicy:
    """What makes the policy `name`; only ours may be told wrong times. Raises InvalidRequest."""
    made = POLICIES.get(name)
    if made is None:
        known = ", ".join(POLICIES)
        raise InvalidRequest(f"There is no policy {name}; there are {known}.")
    if wrong is not None:
        if name != OURS:
            raise InvalidRequest("Only our own policy can be told wrong times.")
        return partial(CostPolicy, wrong=wrong)
    return made
