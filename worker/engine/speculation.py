"""Speculative decoding by prompt lookup: guesses a sequence's next tokens from its own text, and
stops where that does not pay. It owns no block, reads no clock and knows no model.

A draft is what followed the latest earlier occurrence of the sequence's last tokens (Saxena 2023,
"Prompt Lookup Decoding"). Its tokens are computed as further rows of a step, and from each row a
token is drawn with its own key (seed, choice, position). A drawn token is a function of logits and
key alone, so it is right exactly if all tokens before it are: no rejection sampling is needed, and
greedy and sampled streams are those of decoding token by token.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from worker.engine.request import Sequence

ORDERS = (3, 2)  # tokens that must agree; longer ones first
ID_BITS = 21  # larger ids may make n-grams collide: a worse draft, never a wrong token
BATCH = 64  # from so many new tokens on they are indexed by numpy

LENGTH_FIRST = 4
RATE_WEIGHT, RATE_FIRST, RATE_MIN = 0.25, 0.5, 0.3  # of drafts that begin right
PAUSE_FIRST, PAUSE_MAX = 16, 1024  # tokens of a sequence, or steps of the engine

STEPS_KEPT = 16  # durations that a decision rests on
STEPS_MIN = 4
PLAIN_EVERY = 32  # drafted steps to one without, so that the comparison stays current
OUTLIER = 3.0  # times the median: no duration counts for more
GAIN_MIN = 1.02


class Drafter:
    """Drafts for one sequence, whose list of `tokens` grows by appending. O(1) per token.

    Drafts grow while they are accepted whole and shrink to what was; while most are wrong from the
    start it pauses, twice as long each time.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._indexed = 0  # n-grams that end before this token are known
        self._followers: list[dict[int, int]] = [{} for _ in ORDERS]  # n-gram -> what follows it
        self._length = LENGTH_FIRST
        self._rate = RATE_FIRST
        self._pause = PAUSE_FIRST
        self._resume_at = 0

    def propose(self, most: int) -> list[int]:
        """At most `most` tokens that may come next; none if there is no reason to think so."""
        tokens = self._tokens
        if len(tokens) < self._resume_at:
            return []
        self._index()
        for order, followers in zip(ORDERS, self._followers, strict=True):
            if len(tokens) >= order:
                at = followers.get(_packed(tokens[-order:]))
                if at is not None:
                    return self._continued(at, min(most, self._length))
        return []

    def judged(self, drafted: int, accepted: int) -> None:
        """A draft of so many tokens was computed and so many of them were drawn, which the list of
        tokens has by now."""
        self._rate += RATE_WEIGHT * ((accepted > 0) - self._rate)
        self._length = 2 * drafted if accepted == drafted else accepted + 1
        if accepted:
            self._pause = PAUSE_FIRST
        if self._rate < RATE_MIN:
            self._resume_at = len(self._tokens) + self._pause
            self._pause = min(PAUSE_MAX, 2 * self._pause)

    def _continued(self, at: int, count: int) -> list[int]:
        """`count` tokens from `at`; at the end it goes on with itself, as a period does."""
        draft = self._tokens[at : at + count]
        period = len(draft)
        while len(draft) < count:
            draft.append(draft[-period])
        return draft

    def _index(self) -> None:
        tokens, first, last = self._tokens, self._indexed, len(self._tokens)
        self._indexed = last
        if last - first > BATCH:
            ids = np.array(tokens, dtype=np.int64)
            for order, followers in zip(ORDERS, self._followers, strict=True):
                ats = range(max(first, order), last)
                packed = np.zeros(len(ats), dtype=np.int64)
                for back in range(order, 0, -1):
                    packed = (packed << ID_BITS) | ids[ats.start - back : ats.stop - back]
                followers.update(zip(packed.tolist(), ats, strict=True))
            return
        for order, followers in zip(ORDERS, self._followers, strict=True):
            for at in range(max(first, order), last):
                followers[_packed(tokens[at - order : at])] = at


def _packed(ids: list[int]) -> int:
    packed = 0
    for token in ids:
        packed = (packed << ID_BITS) | token
    return packed


class Gate:
    """Whether steps with drafts take less time per token than steps without, at one batch size.

    Durations come from steps that only decode. Closed for PAUSE_FIRST steps once drafts do not pay,
    for twice as many each time they still do not.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=STEPS_KEPT)  # s of a step
        self._drafted: deque[tuple[float, float]] = deque(maxlen=STEPS_KEPT)  # and tokens a row
        self._closed = 0  # steps yet
        self._pause = PAUSE_FIRST
        self._since_plain = 0

    @property
    def is_open(self) -> bool:
        """Whether the next step may draft."""
        measured = len(self._plain) >= STEPS_MIN
        return measured and self._closed == 0 and self._since_plain < PLAIN_EVERY

    def record_plain(self, elapsed_s: float) -> None:
        """A step without drafts took so long."""
        self._plain.append(elapsed_s)
        self._since_plain = 0
        self._closed = max(0, self._closed - 1)

    def record_drafted(self, elapsed_s: float, tokens_per_sequence: float) -> None:
        """A step with drafts took so long and brought so many tokens on average."""
        self._since_plain += 1
        self._drafted.append((elapsed_s, tokens_per_sequence))
        if len(self._drafted) < STEPS_MIN:
            return
        limit_s = OUTLIER * sorted(self._plain)[len(self._plain) // 2]
        plain_s = sum(min(s, limit_s) for s in self._plain) / len(self._plain)
        drafted_s = sum(min(s, limit_s) for s, _ in self._drafted)
        drafted_s /= sum(tokens for _, tokens in self._drafted)
        if drafted_s * GAIN_MIN <= plain_s:
            if len(self._drafted) == STEPS_KEPT:
                self._pause = PAUSE_FIRST
            return
        self._closed, self._pause = self._pause, min(PAUSE_MAX, 2 * self._pause)
        self._drafted.clear()


class Speculator:
    """Drafts for the sequences of one engine; `drafted` and `accepted` count tokens."""

    def __init__(self, most: int) -> None:
        assert most >= 0
        self.most = most  # draft tokens of a sequence and step; 0 = off
        self.drafted = 0
        self.accepted = 0
        self._gates: dict[int, Gate] = {}

    def pays(self, sequences: int) -> bool:
        """Whether a step that decodes so many sequences should draft."""
        return self.most > 0 and self._gate(sequences).is_open

    def propose(self, sequence: Sequence, budget: int) -> list[int]:
        """A draft of at most `budget` tokens, within the sequence's credit and its last token."""
        request = sequence.request
        most = min(self.most, budget, sequence.credit - 1)
        most = min(most, request.tokens_max - len(sequence.tokens) - 1)
        if most < 1:
            return []
        if sequence.drafter is None:
            sequence.drafter = Drafter(sequence.tokens)
        return sequence.drafter.propose(most)

    def judged(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        """A draft was computed; the accepted tokens, and the one after, are the sequence's."""
        assert sequence.drafter is not None and 0 <= accepted <= drafted
        self.drafted += drafted
        self.accepted += accepted
        sequence.drafter.judged(drafted, accepted)

    def record(self, elapsed_s: float, sequences: int, tokens: int, *, drafted: bool) -> None:
        """A step that only decoded took so long and brought so many tokens."""
        if self.most == 0:
            return
        gate = self._gate(sequences)
        if drafted:
            gate.record_drafted(elapsed_s, tokens / sequences)
        else:
            gate.record_plain(elapsed_s)

    def _gate(self, sequences: int) -> Gate:
        """Small batches one by one, larger ones by powers of two."""
        size = sequences if sequences <= 4 else 1 << (sequences - 1).bit_length()
        return self._gates.setdefault(size, Gate())
