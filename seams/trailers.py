"""What goes along with an error that ends a gRPC call: its class and when to retry. Knows no gRPC.

Routers and replicas write it, clients read it from the trailing metadata.
"""

from __future__ import annotations

from seams.errors import BanyanError, NoReplica, Overloaded

RETRY_AFTER_KEY = "retry-after-ms"
PUSHBACK_KEY = "grpc-retry-pushback-ms"  # gRPC's own retries (proposal A6) honour it
ERROR_KEY = "banyan-error"  # the error's class: several share one code
RETRY_AFTER_S = 1.0  # where a retry makes sense and nothing better is known


def retry_after_ms(error: BanyanError) -> int | None:
    """When a retry makes sense; None if it does not."""
    if error.retry_after_s is not None:
        return max(1, int(error.retry_after_s * 1000))
    return int(RETRY_AFTER_S * 1000) if isinstance(error, NoReplica | Overloaded) else None


def trailing(error: BanyanError) -> tuple[tuple[str, str], ...]:
    """The metadata that goes with an error."""
    pairs = [(ERROR_KEY, type(error).__name__)]
    wait_ms = retry_after_ms(error)
    if wait_ms is not None:
        pairs += [(RETRY_AFTER_KEY, str(wait_ms)), (PUSHBACK_KEY, str(wait_ms))]
    return tuple(pairs)
