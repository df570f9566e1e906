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
USUAL_WEIGHT = 0.1  # of the newest prompt
LINE_MAX = 64  # prompts in line that are looked at one by one


class Line(NamedTuple):
    """The prompts in line on a replica as one more finds them."""

    before_s: float  # of prefill that comes before its own
    longer: int  # prompts that it would pass


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
        if self.prefilling.pop(booking.request_id, None) is not None:
            self.prefill_tokens -= booking.prefill_tokens
            self.prompt_tokens -= booking.prompt_tokens
            self.decoding += booking.choices
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

    def line(self, tokens: int, seconds_per_token: float, now_s: float) -> Line:
        """What a prompt that has `tokens` to compute finds. Looks at LINE_MAX prompts in line and
        takes those behind them for as long as their mean.

        The scheduler gives the oldest prompt half of each step and the other half to shorter ones:
        of a longer one, about as much comes before the new one as that is long itself.
        """
        before, longer = 0.0, 0
        done = HEAD_SHARE * max(0.0, now_s - self.head_started_s) / seconds_per_token
        seen_tokens = 0
        for booking in islice(self.prefilling.values(), LINE_MAX):  # the first is under way
            seen_tokens += booking.prefill_tokens
            left, done = max(0.0, booking.prefill_tokens - done), 0.0
            before += min(left, tokens)
            longer += left > tokens
        if (behind := len(self.prefilling) - LINE_MAX) > 0:
            left = (self.prefill_tokens - seen_tokens) / behind
            before += behind * min(left, tokens)
            longer += behind if left > tokens else 0
        if self.foreign_tokens:
            left = self.foreign_tokens / self.foreign_prompts
            before += self.foreign_prompts * min(left, tokens)
            longer += self.foreign_prompts if left > tokens else 0
        return Line(before * seconds_per_token, longer)

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
