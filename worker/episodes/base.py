"""What episodes are made with, and what is known of a conversation's: values only. It knows no
model, no text and no place where anything is stored.

Source: Kim et al., "EpiCache" (arXiv:2509.17396). A conversation's segments are clustered into
episodes; for each the whole conversation is computed under a fixed peak, keeping what a prompt made
of the episode's own segments looks at; a question gets the cache of the episode it is nearest to.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from seams.errors import InvalidRequest
from worker.engine.retention.options import EPICACHE, Options

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

FORMAT = 1  # of what is kept and how: raised when other tokens would be
EPISODES_MAX = 64
UTTERANCES_MAX = 256  # of a segment
PATCH_SHARE = 2  # of a block, at most one part in so many is the patched prompt


@dataclass(frozen=True)
class EpisodeOptions:
    """Whoever builds and whoever asks must say the same ones: they are part of every name.

    At no moment are more than budget + block tokens stored. A block is all the room beyond the
    budget: the conversation's next tokens, and behind them the patched prompt.
    """

    episodes: int = 4
    budget_tokens: int = 2048  # that each episode keeps, per layer and KV head; whole blocks
    block_tokens: int = 512
    window_utterances: int = 4  # of a segment
    medoid_segments: int = 4  # in a patched prompt
    sink_tokens: int = 16  # leading tokens that stay
    seed: int = 42

    @classmethod
    def of(cls, options: Options, page_tokens: int) -> EpisodeOptions:
        """Of `epicache:KEY=VALUE,...`; budget and block are rounded up to whole pages of
        `page_tokens`. Raises InvalidRequest."""
        default = cls()
        made = cls(
            episodes=options.count("episodes", default.episodes, most=EPISODES_MAX),
            budget_tokens=_whole(options.count("budget", default.budget_tokens), page_tokens),
            block_tokens=_whole(options.count("block", default.block_tokens), page_tokens),
            window_utterances=options.count(
                "window", default.window_utterances, most=UTTERANCES_MAX
            ),
            medoid_segments=options.count("medoids", default.medoid_segments, most=UTTERANCES_MAX),
            sink_tokens=options.count("sinks", default.sink_tokens, least=0),
            seed=options.count("seed", default.seed, least=0),
        )
        options.done()
        if made.sink_tokens >= made.budget_tokens:
            raise InvalidRequest("epicache's sinks are fewer than its budget.")
        return made

    @cached_property
    def state_hash(self) -> str:
        """Equal only for options with which the same tokens are kept. Asked for every block of a
        prompt."""
        return f"{EPICACHE}/{FORMAT} {sorted(asdict(self).items())}"

    @property
    def patch_tokens_max(self) -> int:
        """The longest patched prompt."""
        return self.block_tokens // PATCH_SHARE


def _whole(tokens: int, page_tokens: int) -> int:
    return -(-tokens // page_tokens) * page_tokens


@dataclass(frozen=True)
class Segment:
    """A window of utterances: tokens first .. last - 1 of the conversation."""

    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Words:
    """How much each token says of what a text is about: sorted ids [V], weights [V]. A token that
    is not among them says nothing."""

    ids: Ints
    weights: Floats


@dataclass(frozen=True, eq=False)
class EpisodeIndex:
    """What a question is compared with. Row e of the centroids, of length 1, is episode e."""

    history_tokens: int  # of the conversation; whole blocks
    words: Words
    centroids: Floats  # [episodes, dimensions]
    segments: Ints  # [episodes] how many each has
