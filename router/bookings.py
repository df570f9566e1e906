"""Requests that were placed and have not ended: what each promised work adds to its replica's load.

It knows what was booked and what the replica last reported; not how a replica is chosen. A report
counts everybody's requests, the router's own too, so what other routers sent is what the report
says beyond the own bookings of that moment. It counts prompts before any cache hit, as those that
wait have had none yet; how much of such tokens is usually computed, the own bookings tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from banyan.v1 import common_pb2, internal_pb2

HEAD_SHARE = 0.5  # of its replica's time, for the first in line: others and decoding have the rest
BACKLOG_SHARE = 0.5  # of the way from what would come first, if nobody came later, to all there is
USUAL_WEIGHT = 0.1  # of the newest prompt
USUAL_SHARE_MIN = 0.05
LINE_MAX = 64  # prompts in line that are looked at one by one


class Line(NamedTuple):
    """The prompts in line on a replica as one more finds them."""

    before_s: float  # of prefill that comes before its own
    passed: int  # prompts that come after its own though they were there first
    prompts: int  # in line


class _Prompts(NamedTuple):
    """Prompts in line that are taken for equals."""

    left: float  # tokens of each that are to be computed
    whole: float  # tokens of each
    number: int


@dataclass
class Booking:
    """One placed request."""

    request_id: str
    replica: str
    epoch: int
    model: str
    placed_s: float
    prompt_tokens: int
    prefill_tokens: int  # to compute before its first token
    queued_s: float  # predicted wait before its own prefill
    blocks: int  # it will need beyond those it shares
    choices: int
    decision: common_pb2.Decision
    report: int = 0  # how many reports its replica had sent when it was placed


@dataclass
class Workload:
    """What one (replica, epoch) has to do, as this router sees it."""

    bookings: dict[str, Booking] = field(default_factory=dict)
    prefilling: dict[str, Booking] = field(default_factory=dict)  # before the first token, in order
    prefill_tokens: int = 0  # of those
    prompt_tokens: int = 0  # of those
    usual_share: float = 1.0  # of a prompt's tokens, that are computed
    sequences: int = 0  # choices of all bookings
    decoding: int = 0  # choices of bookings past their first token
    fresh_blocks: int = 0  # of bookings placed after the last report
    head_started_s: float = 0.0  # since when the first in `prefilling` is being computed
    foreign_sequences: int = 0
    foreign_tokens: int = 0
    foreign_prompts: int = 0  # that those tokens belong to, about
    reported: internal_pb2.Load = field(default_factory=internal_pb2.Load)
    reports: int = 0

    def add(self, booking: Booking) -> None:
        """Take on a request that was just placed."""
        if not self.prefilling:
            self.head_started_s = booking.placed_s
        booking.report = self.reports
        self.bookings[booking.request_id] = self.prefilling[booking.request_id] = booking
        self.prefill_tokens += booking.prefill_tokens
        self.prompt_tokens += booking.prompt_tokens
        share = booking.prefill_tokens / max(1, booking.prompt_tokens)
        self.usual_share += USUAL_WEIGHT * (share - self.usual_share)
        self.sequences += booking.choices
        self.fresh_blocks += booking.blocks

    def end_prefill(self, booking: Booking, now_s: float) -> None:
        """Its first token is out, or it ended before. Safe to repeat."""
        head = next(iter(self.prefilling), None)
        if self.prefilling.pop(booking.request_id, None) is not None:
            self.prefill_tokens -= booking.prefill_tokens
            self.prompt_tokens -= booking.prompt_tokens
            self.decoding += booking.choices
            if head == booking.request_id:  # who only passed it leaves its start alone
                self.head_started_s = now_s

    def remove(self, booking: Booking, now_s: float) -> None:
        """The request ended."""
        self.end_prefill(booking, now_s)
        del self.bookings[booking.request_id]
        self.sequences -= booking.choices
        self.decoding -= booking.choices
        if booking.report == self.reports:
            self.fresh_blocks -= booking.blocks

    def report(self, load: internal_pb2.Load) -> None:
        """The replica's own figures arrived; bookings so far are in them."""
        self.foreign_sequences = max(0, load.running + load.waiting - self.sequences)
        foreign = max(0, load.queued_prefill_tokens - self.prompt_tokens)
        self.foreign_tokens = int(foreign * self.usual_share)
        waiting = load.waiting - len(self.prefilling) + 1  # and one under way
        self.foreign_prompts = max(1, min(waiting, self.foreign_sequences))
        self.fresh_blocks = 0
        self.reported = load
        self.reports += 1

    @property
    def batch(self) -> int:
        """Sequences there, of all routers."""
        return self.sequences + self.foreign_sequences

    def line(self, prompt: int, tokens: int, seconds_per_token: float, now_s: float) -> Line:
        """What a prompt of `prompt` tokens finds that has `tokens` of them to compute.

        The scheduler gives the oldest prompt half of each step while others are shorter, as a
        whole, than what that one has left; they have the other half, in the order they came. So a
        shorter one waits for those shorter ones and for as much of the oldest; a longer one waits
        for all in line. But who comes later passes too, and how much is done is a guess: the answer
        is drawn towards the whole backlog.
        """
        done = HEAD_SHARE * max(0.0, now_s - self.head_started_s) / seconds_per_token
        line = self._line(done)
        if not line:
            return Line(0.0, 0, 0)
        head, others = line[0].left, line[1:]
        if prompt < head:
            shorter = sum([p.left * p.number for p in others if p.whole < head])
            before = shorter + min(head, shorter + tokens)
            passed = 1 + sum([p.number for p in others if p.whole >= head])
        else:
            before, passed = sum([p.left * p.number for p in line]), 0
        backlog = self.prefill_tokens + self.foreign_tokens
        before += BACKLOG_SHARE * (backlog - before)
        return Line(before * seconds_per_token, passed, sum([p.number for p in line]))

    def _line(self, done_tokens: float) -> list[_Prompts]:
        """Who is in line, the oldest first and alone; of the first of our own, so much is done.
        Other routers' are older, as far as this one knows. At most LINE_MAX of our own one by one,
        those behind them as their mean."""
        line, seen = [], list(islice(self.prefilling.values(), LINE_MAX))
        if self.foreign_tokens:
            left = self.foreign_tokens / self.foreign_prompts
            whole = left / max(USUAL_SHARE_MIN, self.usual_share)
            line = [_Prompts(left, whole, 1), _Prompts(left, whole, self.foreign_prompts - 1)]
        for booking in seen:
            left = max(0.0, booking.prefill_tokens - done_tokens)
            line.append(_Prompts(left, booking.prompt_tokens, 1))
            done_tokens = 0.0
        if (behind := len(self.prefilling) - LINE_MAX) > 0:
            left = (self.prefill_tokens - sum([b.prefill_tokens for b in seen])) / behind
            whole = (self.prompt_tokens - sum([b.prompt_tokens for b in seen])) / behind
            line.append(_Prompts(left, whole, behind))
        return line

    def check_integrity(self) -> None:
        """Assert that the sums agree with the bookings."""
        everything = self.bookings.values()
        assert self.prefilling.items() <= self.bookings.items()
        assert self.prefill_tokens == sum(b.prefill_tokens for b in self.prefilling.values())
        assert self.prompt_tokens == sum(b.prompt_tokens for b in self.prefilling.values())
        assert self.sequences == sum(b.choices for b in everything)
        early = sum(b.choices for b in self.prefilling.values())
        assert self.decoding == self.sequences - early
        assert self.fresh_blocks == sum(b.blocks for b in everything if b.report == self.reports)
