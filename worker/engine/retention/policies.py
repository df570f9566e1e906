"""Policies: what retention one replica offers; texts to policies. It knows no sequence."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from seams.errors import InvalidRequest, LaunchError
from worker.calibration.statistics import Statistics
from worker.engine.retention.base import Quota, RetentionPolicy
from worker.engine.retention.epicache import EpiCache
from worker.engine.retention.options import EPICACHE, NONE, REQUESTS, RESUME, Options
from worker.engine.retention.snapkv import SnapKV
from worker.engine.retention.streaming import Streaming
from worker.engine.retention.triattention import Centres, TriAttention
from worker.episodes.base import EpisodeOptions
from worker.models.base import ModelSpec

WINDOW_TOKENS, INTERVAL_TOKENS = 1024, 128
BUDGET_TOKENS, PROTECTED_TOKENS, BAND = 2048, 128, 0.1
SNAP_TOKENS, KERNEL_TOKENS = 32, 7
SNAP_TOKENS_MAX = 128  # a float32 logit of every query head for each of them and each stored token
KERNEL_TOKENS_MAX = 255
INTERVAL_SHARE = 16  # of a scored budget: a round reads all that is stored


class Policies:
    """Makes policies for one model; `default` is of requests that ask for none."""

    def __init__(
        self, spec: ModelSpec, default: str = REQUESTS, statistics: Statistics | None = None
    ) -> None:
        """Raises LaunchError for a model that cannot be pruned, InvalidRequest for a text."""
        if any(group.window_tokens for group in spec.groups):
            raise LaunchError(
                "Retention needs a model without sliding windows: those drop tokens already."
            )
        self._block_tokens, self._context_tokens = spec.block_tokens, spec.context_tokens
        self._statistics = statistics
        self._centres = Centres.of(statistics) if statistics else None
        self._watched = spec.reads_queries
        self._readable = spec.reads_keys and len(spec.groups) == 1
        self._makers: dict[str, Callable[[Options], RetentionPolicy]] = {
            EPICACHE: self._epicache,
            "snapkv": self._snapkv,
            "streaming": self._streaming,
            "triattention": self._triattention,
        }
        self.default = None if default == REQUESTS else self.make(default)

    @property
    def numerics(self) -> str:
        """Part of a numeric class: what requests that ask for nothing are given here; "" if that
        is what they would be given without policies."""
        if self.default is None:
            return ""
        kept = self.default.state_hash + (" resumed" if self.default.resume else "")
        return "-kept-" + hashlib.sha256(kept.encode()).hexdigest()[:8]

    def make(self, text: str) -> RetentionPolicy | None:
        """The policy of a text, None for "none". Raises InvalidRequest."""
        options = Options(text)
        if options.name == NONE:
            options.done()
            return None
        maker = self._makers.get(options.name)
        if maker is None:
            names = ", ".join([NONE, *sorted(self._makers)])
            raise InvalidRequest(f"There is no such retention policy; there are {names}.")
        policy = maker(options)
        options.done()
        return policy

    def _streaming(self, options: Options) -> RetentionPolicy:
        """With `sinks` the first tokens and the last ones stay, else the prompt and the last."""
        sinks = options.count("sinks", 4) if options.has("sinks") else 0
        window = options.count("window", WINDOW_TOKENS)
        interval = self._whole(options.count("interval", INTERVAL_TOKENS))
        sinks = self._whole(sinks)
        quota = Quota(sinks + window, interval, suffix=not sinks, sink_tokens=sinks)
        return Streaming(quota, resume=options.flag(RESUME))

    def _snapkv(self, options: Options) -> RetentionPolicy:
        """`budget` generated tokens stay, the newest `window` of them and what those look at."""
        if not (self._readable and self._watched):
            raise InvalidRequest("snapkv needs a model that torch computes (--compute torch).")
        budget = options.count("budget", BUDGET_TOKENS)
        interval = self._interval(options, budget)
        default = min(SNAP_TOKENS, budget - 1, interval)
        window = options.count("window", default, most=SNAP_TOKENS_MAX)
        if window >= budget or window > interval:
            raise InvalidRequest("snapkv's window is below its budget, and no more than interval.")
        kernel = options.count("kernel", KERNEL_TOKENS, most=KERNEL_TOKENS_MAX)
        if kernel % 2 == 0:
            raise InvalidRequest("snapkv's kernel is an odd number.")
        return SnapKV(Quota(budget, interval), window, kernel, resume=options.flag(RESUME))

    def _triattention(self, options: Options) -> RetentionPolicy:
        """`budget` generated tokens stay, of those the newest `window` whatever their scores."""
        if not self._readable:
            raise InvalidRequest("triattention needs a model whose keys can be read.")
        if self._statistics is None or self._centres is None:
            raise InvalidRequest("triattention needs the replica's calibration file.")
        budget = options.count("budget", BUDGET_TOKENS)
        window = options.count("window", min(PROTECTED_TOKENS, budget - 1), least=0)
        if window >= budget:
            raise InvalidRequest("triattention's window is smaller than its budget.")
        return TriAttention(
            quota=Quota(budget, self._interval(options, budget)),
            centres=self._centres,
            calibration=self._statistics.hash,
            window_tokens=window,
            per_head=options.choice("select", ("union", "head")) == "head",
            band=options.share("band", BAND),
            resume=options.flag(RESUME),
        )

    def _epicache(self, options: Options) -> RetentionPolicy:
        """`budget` tokens of a conversation, chosen beforehand for what a question is about."""
        if not (self._readable and self._watched):
            raise InvalidRequest("epicache needs a model that torch computes (--compute torch).")
        return EpiCache.of(EpisodeOptions.of(options, self._block_tokens), self._context_tokens)

    def _interval(self, options: Options, budget: int) -> int:
        """Of a policy that scores: so many tokens that a round's cost stays a share of theirs."""
        asked = options.count("interval", INTERVAL_TOKENS)
        return self._whole(max(asked, budget // INTERVAL_SHARE))

    def _whole(self, tokens: int) -> int:
        """Whole blocks: a round then frees what it drops, and sinks need no copy."""
        return -(-tokens // self._block_tokens) * self._block_tokens


def policy_of(text: str, policies: Policies | None) -> RetentionPolicy | None:
    """What a request that says `text` gets of a replica. Raises InvalidRequest."""
    if policies is not None:
        return policies.default if text == "" else policies.make(text)
    if text not in ("", NONE):
        raise InvalidRequest("This replica serves no retention policy (--retention requests).")
    return None
