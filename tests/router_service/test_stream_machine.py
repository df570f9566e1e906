"""ClientStream under random frames, deaths, failures and readers: no gap, one end, credit kept."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from banyan.v1 import api_pb2, common_pb2, internal_pb2
from kvstore.keys import root
from router.outbox import OUTBOX_BYTES_MAX, Outbox, credit_for
from router.placement import Placement
from router.stream import ClientStream, Phase, StreamSpec
from router.text.output import ChoiceText
from seams.clock import VirtualClock
from seams.errors import DeadlineExceeded, ReplicaLost

ROOT = root("m", "", 4)
LETTERS = "abc"


class Spelled:
    """Tokens are characters."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def flush(self) -> str:
        return ""


def truth(seed: int, choice: int, count: int) -> list[int]:
    draw = random.Random(f"{seed}/{choice}")
    return [ord(draw.choice(LETTERS)) for _ in range(count)]


def make_spec(seed: int, choices: int, count: int, stops: tuple[str, ...], had: int) -> StreamSpec:
    sampling = common_pb2.Sampling(seed=seed, max_tokens=count, n=choices)
    return StreamSpec(
        request_id="r",
        model="m",
        root_id=ROOT,
        block_tokens=4,
        prompt=(1, 2, 3, 4, 5),
        sampling=sampling,
        tenant="default",
        salt=b"s",
        emitted=tuple(truth(seed, 0, had)) if choices == 1 else (),
        new_text=lambda: ChoiceText(Spelled(), stops),
        label="label",
        credit_tokens=4,
    )


def placement(replica: str) -> Placement:
    return Placement("r", replica, 1, "a:1", False, common_pb2.Decision(replica=replica))


class StreamMachine(RuleBasedStateMachine):
    """One stream; `sent[c]` is how far the present replica has come with choice c."""

    @initialize(
        seed=st.integers(0, 10_000),
        choices=st.sampled_from([1, 1, 1, 3]),
        count=st.integers(1, 30),
        stops=st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=2),
        had=st.integers(0, 5),
    )
    def begin(self, seed: int, choices: int, count: int, stops: list[str], had: int) -> None:
        had = min(had, count)
        spec = make_spec(seed, choices, count, tuple(stops), had)
        self.clock = VirtualClock()
        self.stream = ClientStream(spec, self.clock, attempts_max=3)
        self.had = had if choices == 1 else 0
        self.truth = [truth(seed, c, count) for c in range(choices)]
        self.count, self.choices, self.stops = count, choices, stops
        self.got: list[api_pb2.GenerateResponse] = []
        self.replicas = 0
        self.failed = False
        self.usages: list[common_pb2.Usage] = []
        self.sent: list[int] = []
        self.limit = 0
        self.cancelled = False
        self.in_flight = False

    # ---- what the world does ---------------------------------------------------------------------

    @precondition(lambda self: self.stream.phase is Phase.PLACING)
    @rule()
    def place(self) -> None:
        request = self.stream.place_request(frozenset())
        self.replicas += 1
        submit = self.stream.placed(placement(f"w{self.replicas}"), None)
        had = len(submit.token_ids) - submit.prompt_tokens
        assert request.tokens == len(submit.token_ids) and len(request.keys) == request.tokens // 4
        assert list(submit.token_ids[submit.prompt_tokens :]) == self.truth[0][:had]
        assert had == 0 or self.choices == 1
        assert had < self.count, "a complete stream is not placed again"
        self.sent = [had] * self.choices
        self.endless: set[int] = set()  # choices with all tokens whose end is still to be said
        self.limit = had + submit.credit_tokens
        self.cancelled, self.in_flight = False, True

    def _open(self) -> list[int]:
        return [c for c in range(self.choices) if self.sent[c] < self.count]

    @precondition(lambda self: self.in_flight and self._open())
    @rule(
        draw=st.randoms(use_true_random=False),
        tokens=st.integers(1, 4),
        again=st.integers(0, 2),
        late=st.booleans(),
    )
    def emit(self, draw: random.Random, tokens: int, again: int, late: bool) -> None:
        """The next tokens of a choice, perhaps repeating some; its end may follow on its own."""
        choice = draw.choice(self._open())
        end = min(self.sent[choice] + tokens, self.limit, self.count)
        if end <= self.sent[choice]:
            return  # no credit: the replica waits
        start = max(self.had if self.choices == 1 else 0, self.sent[choice] - again)
        self.sent[choice] = end
        emission = internal_pb2.Emission(
            request_id="r",
            choice=choice,
            position=start,
            token_ids=self.truth[choice][start:end],
        )
        if end == self.count and late:
            self.endless.add(choice)
        elif end == self.count:
            self._end(emission)
        self._receive(emission)

    def _end(self, emission: internal_pb2.Emission) -> None:
        emission.finish = common_pb2.FINISH_REASON_LENGTH
        if not self._open() and not self.endless:
            self._last(emission)

    @precondition(lambda self: self.in_flight and self.endless)
    @rule()
    def say_the_end(self) -> None:
        choice = self.endless.pop()
        emission = internal_pb2.Emission(choice=choice, position=self.count)
        self._end(emission)
        self._receive(emission)

    def _last(self, emission: internal_pb2.Emission) -> None:
        emission.last = True
        emission.usage.prompt_tokens = 5
        emission.usage.cached_tokens = 2 * self.replicas  # of another replica: too large at times
        emission.usage.recomputed_tokens = 1
        self.usages.append(emission.usage)
        self.in_flight = False

    def _receive(self, emission: internal_pb2.Emission) -> None:
        self.clock.advance(0.01)
        if self.stream.receive(emission):
            assert not self.cancelled, "cancelled twice"
            self.cancelled = True
        self.limit += self.stream.credit_due()
        if self.stream.phase in (Phase.PLACING, Phase.OVER):
            self.in_flight = False  # the relay no longer listens

    @precondition(lambda self: self.in_flight and self.cancelled)
    @rule()
    def answer_cancel(self) -> None:
        emission = internal_pb2.Emission(finish=common_pb2.FINISH_REASON_CANCELLED)
        self._last(emission)
        self._receive(emission)

    @precondition(lambda self: self.in_flight and self._open())
    @rule(kind=st.sampled_from(["gap", "early", "choice", "cancelled", "movable"]))
    def misbehave(self, kind: str) -> None:
        at = self.sent[0]
        emission = {
            "gap": internal_pb2.Emission(position=at + 1, token_ids=[97]),
            "early": internal_pb2.Emission(position=at, last=True),
            "choice": internal_pb2.Emission(choice=9, token_ids=[97]),
            "cancelled": internal_pb2.Emission(
                finish=common_pb2.FINISH_REASON_CANCELLED, last=True
            ),
            "movable": internal_pb2.Emission(
                error=common_pb2.Status(code=14, message="Gone."), last=True
            ),
        }[kind]
        self._receive(emission)
        if emission.last:
            self.in_flight = False

    @precondition(lambda self: self.in_flight)
    @rule()
    def die(self) -> None:
        self.in_flight = False
        self.stream.lost(ReplicaLost("The replica was lost."))

    @precondition(lambda self: self.in_flight)
    @rule()
    def refuse(self) -> None:
        status = common_pb2.Status(code=3, message="No.")
        self._receive(internal_pb2.Emission(error=status, last=True))
        self.in_flight = False

    @rule()
    def stray(self) -> None:
        """A late emission after the relay has turned away: it must change nothing."""
        if self.stream.phase in (Phase.PLACING, Phase.OVER):
            before = len(self.stream.outbox), self.stream.phase
            late = internal_pb2.Emission(position=0, token_ids=[97, 97], last=True)
            assert not self.stream.receive(late)
            assert (len(self.stream.outbox), self.stream.phase) == before

    @rule()
    def settle(self) -> None:
        self.stream.settle()
        if self.stream.phase is Phase.OVER:
            self.in_flight = False

    @rule(now=st.booleans())
    def time_is_over(self, now: bool) -> None:
        if now and self.replicas > 2:
            self.failed = True
            self.stream.fail(DeadlineExceeded("Over."))
            self.in_flight = False

    @rule()
    def read(self) -> None:
        """The client takes all that waits; credit follows."""
        batch = self.stream.outbox.take()
        self.got += batch
        self.stream.consumed(batch)
        self.limit += self.stream.credit_due()
        if self.stream.phase is Phase.RUNNING and self.in_flight:
            going = [self.sent[c] < self.limit for c in range(self.choices)]
            assert any(going), "nobody may go on"

    # ---- what must hold --------------------------------------------------------------------------

    @invariant()
    def one_end_and_no_gap(self) -> None:
        kinds = [response.WhichOneof("event") for response in self.got]
        assert kinds.count("started") <= 1 and kinds.count("finished") <= 1
        assert not kinds or kinds[0] == "started"
        if "finished" in kinds:
            assert kinds[-1] == "finished" and self.stream.error is None
        for choice in range(self.choices):
            self._check_choice(choice)

    def _check_choice(self, choice: int) -> None:
        ids, text, ended = list(self.truth[0][: self.had]), "", False
        for response in self.got:
            if response.HasField("delta") and response.delta.choice == choice:
                assert not ended and response.delta.position == len(ids)
                ids += response.delta.token_ids
                text += response.delta.text
            if response.HasField("choice_finished") and response.choice_finished.choice == choice:
                assert not ended
                ended = True
                text += response.choice_finished.text
                self._check_end(choice, ids, text, response.choice_finished)
        assert ids == self.truth[choice][: len(ids)]

    def _check_end(
        self, choice: int, ids: list[int], text: str, end: api_pb2.ChoiceFinished
    ) -> None:
        whole, stop = _cut("".join(map(chr, self.truth[choice])), self.stops)
        seed, stops = self.stream.spec.sampling.seed, tuple(self.stops)
        seen = ClientStream(make_spec(seed, 1, self.count, stops, 0), self.clock)
        before = "".join(
            seen._choices[0].push(i) for i in ids[: self.had] if not seen._choices[0].stop
        )
        assert before + text == whole and end.stop == stop
        reason = common_pb2.FINISH_REASON_STOP_STRING if stop else common_pb2.FINISH_REASON_LENGTH
        assert end.reason == reason

    @invariant()
    def small(self) -> None:
        assert self.stream.outbox._bytes <= OUTBOX_BYTES_MAX

    def teardown(self) -> None:
        if not hasattr(self, "stream"):
            return
        draw = random.Random(0)
        for _ in range(400):  # the world is kind from now on: the stream must come to its end
            if self.stream.phase is Phase.OVER:
                break
            if self.stream.phase is Phase.PLACING:
                self.place()
            elif not self.in_flight:
                self.stream.lost(ReplicaLost("The replica was lost."))
            elif self.cancelled:
                self.answer_cancel()
            elif self.endless:
                self.say_the_end()
            else:
                self.emit(draw, 2, 0, late=False)
            self.read()
        self.read()
        self.one_end_and_no_gap()
        assert self.stream.phase is Phase.OVER
        finished = [r.finished for r in self.got if r.HasField("finished")]
        assert len(finished) == (self.stream.error is None)
        if finished:
            self._check_usage(finished[0].usage)

    def _check_usage(self, usage: common_pb2.Usage) -> None:
        assert usage.prompt_tokens == 5
        assert usage.cached_tokens + usage.computed_tokens == 5
        assert usage.moves == max(0, self.replicas - 1)
        ids = sum(len(r.delta.token_ids) for r in self.got if r.HasField("delta"))
        assert ids <= usage.completion_tokens <= ids + self.had


def _cut(text: str, stops: list[str]) -> tuple[str, str]:
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, ""


TestStreamMachine = StreamMachine.TestCase
TestStreamMachine.settings = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@pytest.mark.parametrize("choices", [1, 2, 64])
@pytest.mark.parametrize("logprobs", [None, 0, 20])
def test_credit_bounds_what_can_wait(choices: int, logprobs: int | None) -> None:
    """As many tokens as credit allows, each as large as reckoned, fit the outbox."""
    credit = credit_for(choices, logprobs, 256)
    assert 1 <= credit <= 256
    outbox = Outbox()
    entry = common_pb2.PositionLogprobs(chosen=common_pb2.TokenLogprob(token_id=1, logprob=-1))
    for _ in range(logprobs or 0):
        entry.top.add(token_id=100_000, logprob=-1.0)
    for choice in range(choices):
        for at in range(credit):
            outbox.put_delta(choice, at, [7], "text", [entry] if logprobs is not None else [])
    assert not outbox.overfull and len(outbox) == choices


def test_a_choice_that_waits_for_blocks_does_not_hold_back_another() -> None:
    stream = ClientStream(make_spec(1, 2, 100, (), 0), VirtualClock())
    limit = stream.placed(placement("w"), None).credit_tokens
    at = 0
    while at < 90:  # only choice 0 gets anywhere
        assert at < limit, "it has to wait for the other"
        emission = internal_pb2.Emission(position=at, token_ids=truth(1, 0, 100)[at : at + 1])
        assert not stream.receive(emission)
        stream.consumed(stream.outbox.take())
        limit += stream.credit_due()
        at += 1


def test_a_flood_beyond_the_credit_ends_the_stream() -> None:
    stream = ClientStream(make_spec(1, 1, 1 << 20, (), 0), VirtualClock())
    stream.placed(placement("w"), None)
    cancelled, at = False, 0
    while not cancelled:
        ids = [97] * 4096
        cancelled = stream.receive(internal_pb2.Emission(position=at, token_ids=ids))
        at += len(ids)
        assert at < 1 << 20
    assert stream.phase is Phase.OVER and stream.error is not None
    assert stream.outbox._bytes < OUTBOX_BYTES_MAX + 4096 * 64


@pytest.mark.parametrize("choices", [1, 2, 5])
def test_what_is_learnt_is_of_one_choice(choices: int) -> None:
    """Several choices decode side by side: as many steps, not as many times the output."""
    clock = VirtualClock()
    stream = ClientStream(make_spec(1, choices, 11, (), 0), clock)
    stream.placed(placement("w"), None)
    for at in range(11):
        clock.advance(0.5)
        for choice in range(choices):
            emission = internal_pb2.Emission(
                choice=choice, position=at, token_ids=truth(1, choice, 11)[at : at + 1]
            )
            if at == 10:
                emission.finish = common_pb2.FINISH_REASON_LENGTH
                emission.last = choice == choices - 1
                if emission.last:
                    emission.usage.prompt_tokens = 5
            stream.receive(emission)
    assert stream.phase is Phase.OVER
    seen = stream.observed()
    assert (seen.decode_tokens, seen.decode_s, seen.prefill_s) == (10, 5.0, 0.5)
