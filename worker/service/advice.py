"""What a replica does but should be warned of. Knows settings as texts; refuses nothing."""

from __future__ import annotations

from kernels.codecs.names import parse_codec
from worker.engine.retention.options import REQUESTS, SCORED, Options

KEY_BITS_PRUNED_MIN = 3  # of keys that a policy scores; with fewer the ranking of tokens suffers


def pruning_warning(codec: str, retention: str) -> str:
    """One sentence if tokens would be chosen by keys that are stored too coarsely for it, else "".
    Raises InvalidRequest for what is no policy."""
    name = parse_codec(codec)
    if not retention or name is None or not 0 < name.key_bits < KEY_BITS_PRUNED_MIN:
        return ""
    if Options(retention).name not in (*SCORED, REQUESTS):
        return ""
    return (
        f"The KV codec {codec} keeps keys in fewer than {KEY_BITS_PRUNED_MIN} bits: policies that "
        "score keys may drop the wrong tokens."
    )
