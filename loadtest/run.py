"""Plays sessions against a target and notes every request. Knows no workload and no figure.

A request's latency also counts from when it should have been sent, so a server that stalls cannot
hide behind a generator that waits for it; how late the generator itself is shows apart, as
`delay_s`. Whatever goes wrong with a request is in its record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from loadtest.records import OK, SKIPPED, Record
from loadtest.targets.base import Ask, Ended, Piece, Target
from loadtest.workloads.base import Message, Session, Turn
from seams.clock import Clock
from seams.errors import BanyanError, DeadlineExceeded, InternalError


class Watch(Protocol):
    """Is told what happens, for people who wait. Must be quick."""

    def began(self, load: str, requests: int) -> None:
        """A stage begins."""
        ...

    def sent(self) -> None:
        """A request is on its way."""
        ...

    def ended(self, record: Record) -> None:
        """It has ended; also told of requests that were never sent."""
        ...


@dataclass
class _Heard:
    """What has come of one answer so far."""

    chunks_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    ended: Ended | None = None


@dataclass(frozen=True)
class _Outcome:
    """Of a turn: what a later one's prompt is made of, None if it failed."""

    transcript: tuple[Message, ...] | None
    answer: str
    end_s: float


class Player:
    """Sends the sessions of one stage. `note` gets every record, in the order of the ends;
    `origin_s` is the clock's time that records count from."""

    def __init__(
        self,
        target: Target,
        clock: Clock,
        origin_s: float,
        note: Callable[[Record], None],
        watch: Watch,
        *,
        stage: int,
        warmup: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        self._target, self._clock, self._origin_s = target, clock, origin_s
        self._note, self._watch = note, watch
        self._stage, self._warmup, self._timeout_s = stage, warmup, timeout_s

    async def open_loop(self, sessions: Sequence[Session], times_s: Sequence[float]) -> None:
        """Begin each session at its time from now on, whatever has become of the others."""
        start_s = self._now_s()
        async with asyncio.TaskGroup() as group:
            for session, at_s in zip(sessions, times_s, strict=True):
                await self._until(start_s + at_s)
                group.create_task(self._play(session, start_s + at_s))

    async def closed_loop(
        self, sessions: Sequence[Session], concurrency: int, duration_s: float | None = None
    ) -> None:
        """Keep `concurrency` sessions running; after `duration_s` none begins any more."""
        waiting = iter(sessions)
        until_s = float("inf") if duration_s is None else self._now_s() + duration_s
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(sessions))):
                group.create_task(self._user(waiting, until_s))

    async def _user(self, waiting: Iterator[Session], until_s: float) -> None:
        while (now_s := self._now_s()) < until_s and (session := next(waiting, None)) is not None:
            await self._play(session, now_s)

    async def _play(self, session: Session, begin_s: float) -> None:
        """All turns, each as soon as those that it needs have ended. None raises: what goes wrong
        with a request is its outcome."""
        outcomes: list[asyncio.Task[_Outcome]] = []
        async with asyncio.TaskGroup() as group:
            for number in range(len(session.turns)):
                turn = self._turn(session, number, begin_s, outcomes[:number])
                outcomes.append(group.create_task(turn))

    async def _turn(
        self, session: Session, number: int, begin_s: float, before: list[asyncio.Task[_Outcome]]
    ) -> _Outcome:
        turn = session.turns[number]
        needed = {need: await before[need] for need in turn.needs}
        ready_s = max((outcome.end_s for outcome in needed.values()), default=begin_s)
        intended_s = ready_s + turn.wait_s
        messages = _prompt(turn, needed)
        if messages is None:
            record = self._record(session, number, intended_s, None, intended_s, _Heard(), None)
            self._tell(record)
            return _Outcome(None, "", intended_s)
        await self._until(intended_s)
        return await self._send(session, number, intended_s, messages)

    async def _send(
        self, session: Session, number: int, intended_s: float, messages: tuple[Message, ...]
    ) -> _Outcome:
        heard, error = _Heard(), None
        ask = Ask(messages, session.turns[number].output_tokens, session.name)
        self._watch.sent()
        sent_s = self._now_s()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._listen(ask, sent_s, heard)
        except BanyanError as failed:
            error = failed
        except TimeoutError:
            error = DeadlineExceeded(f"No whole answer within {self._timeout_s:g} s.")
        end_s = self._now_s()
        self._tell(self._record(session, number, intended_s, sent_s, end_s, heard, error))
        if error is not None:
            return _Outcome(None, "", end_s)
        answer = "".join(heard.texts)
        return _Outcome((*messages, Message("assistant", answer)), answer, end_s)

    async def _listen(self, ask: Ask, sent_s: float, heard: _Heard) -> None:
        async with aclosing(self._target.ask(ask)) as stream:
            async for event in stream:
                heard.texts.append(event.text)
                if isinstance(event, Piece):
                    heard.chunks_s.append(self._now_s() - sent_s)
                else:
                    heard.ended = event
        if heard.ended is None:
            raise InternalError("The stream ended without its usage.")

    def _record(
        self, session: Session, number: int, intended_s: float, sent_s: float | None,
        end_s: float, heard: _Heard, error: BanyanError | None,
    ) -> Record:  # fmt: skip
        ended = heard.ended or Ended(0, None, 0)
        status = SKIPPED if sent_s is None else OK if error is None else error.status.name
        skipped = "A turn that it needs has failed." if sent_s is None else ""
        return Record(
            stage=self._stage, session=session.name, turn=number, group=session.group,
            warmup=self._warmup, intended_s=intended_s, sent_s=sent_s, end_s=end_s,
            chunks_s=tuple(heard.chunks_s), prompt_tokens=ended.prompt_tokens,
            cached_tokens=ended.cached_tokens, output_tokens=ended.output_tokens,
            wanted_tokens=session.turns[number].output_tokens, replica=ended.replica,
            request_id=ended.request_id, moves=ended.moves, status=status,
            error=skipped if error is None else error.message,
        )  # fmt: skip

    def _tell(self, record: Record) -> None:
        self._note(record)
        self._watch.ended(record)

    def _now_s(self) -> float:
        return self._clock.now() - self._origin_s

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._now_s()))


def _prompt(turn: Turn, needed: dict[int, _Outcome]) -> tuple[Message, ...] | None:
    """What the turn sends; None if something that it needs has failed."""
    begun: tuple[Message, ...] | None = ()
    if turn.follows is not None:
        begun = needed[turn.follows].transcript
    if begun is None or any(needed[quoted].transcript is None for quoted in turn.quotes):
        return None
    *first, last = turn.messages
    quoted = (needed[number].answer for number in turn.quotes)
    whole = Message(last.role, "\n\n".join([last.content, *quoted]))
    return (*begun, *first, whole)
