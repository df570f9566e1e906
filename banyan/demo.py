"""`banyan demo`: a real model on two replicas, users who share a system prompt, with and without
the cache. It verifies what it shows and leaves nothing running."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.live import Live
from rich.table import Table

from banyan.channel import banyan_stub
from banyan.cli import output
from banyan.client import Client
from banyan.cluster import launch, stop
from banyan.cluster.spec import ClusterSpec, gpus
from banyan.demo_texts import SYSTEM, USERS
from banyan.events import ChoiceFinished, Collector, Completion, Delta
from banyan.routers import Deadline
from banyan.wire import Options
from seams.bench import Report, Row, median
from seams.errors import InternalError, InvalidRequest

if TYPE_CHECKING:
    from router.text.model import TextModel

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Asked:
    """One request of the demo and its answer."""

    user: str
    turn: int
    messages: Messages
    answer: Completion
    ttft_s: float
    shareable: int = 0  # tokens of the prompt that earlier requests left in a cache; those at
    # the same time may add some, so that more than these are cached


class Screen:
    """The answers as they stream, one row per user; safe under threads."""

    def __init__(self, title: str, users: list[str]) -> None:
        self._title = title
        self._lock = threading.Lock()
        self._texts = dict.fromkeys(users, "")
        self.live = Live(self._draw(), console=output.console, refresh_per_second=8)

    def _draw(self) -> Table:
        table = Table(title=self._title, title_justify="left", show_header=False, box=None)
        for user, text in self._texts.items():
            table.add_row(f"[bold]{user}[/bold]", text.strip().replace("[", r"\["))
        return table

    def write(self, user: str, text: str) -> None:
        """Add to a user's answer."""
        with self._lock:
            self._texts[user] += text
            self.live.update(self._draw())


class Demo:
    """The conversation of all users with one cluster."""

    def __init__(self, client: Client, users: int, max_tokens: int) -> None:
        self._client = client
        self._users = USERS[:users]
        self._max_tokens = max_tokens
        self.first_token_at: float | None = None

    def ask(self, user: str, turn: int, messages: Messages, screen: Screen | None) -> Asked:
        """One request, streamed; without a screen it also goes without the cache."""
        began, first_s = time.monotonic(), 0.0
        collector = Collector(1)
        options: Options = {"max_tokens": self._max_tokens, "session": user}
        options["no_cache"] = screen is None
        for event in self._client.generate(messages, **options):
            collector.add(event)
            if isinstance(event, Delta | ChoiceFinished):
                first_s = first_s or time.monotonic() - began
                if self.first_token_at is None:
                    self.first_token_at = time.time()
                if screen is not None:
                    screen.write(user, event.text)
        return Asked(user, turn, messages, collector.completion(), first_s)

    def turn(self, number: int, before: dict[str, Asked]) -> list[Asked]:
        """All users' next turn: the very first one alone, so that it has something to share."""
        prompts = {user[0]: self._next(user, number, before) for user in self._users}
        names = list(prompts)
        screen = Screen(f"turn {number}", names)
        alone = 1 if number == 1 else 0
        with screen.live:
            asked = [self.ask(name, number, prompts[name], screen) for name in names[:alone]]
            asked += self._at_once(
                [partial(self.ask, name, number, prompts[name], screen) for name in names[alone:]]
            )
        output.console.print()
        return asked

    def _next(self, user: tuple[str, str, str], number: int, before: dict[str, Asked]) -> Messages:
        said = {"role": "user", "content": user[number]}
        earlier = before.get(user[0])
        if earlier is None:
            return [{"role": "system", "content": SYSTEM}, said]
        answered = {"role": "assistant", "content": earlier.answer.text}
        return [*earlier.messages, answered, said]

    def again_uncached(self, asked: list[Asked]) -> list[Asked]:
        """The same prompts at the same pace, neither read from nor fed into any cache."""
        found: list[Asked] = []
        for number in (1, 2):
            same = [a for a in asked if a.turn == number]
            alone = 1 if number == 1 else 0
            asks = [partial(self.ask, a.user, a.turn, a.messages, None) for a in same]
            found += [ask() for ask in asks[:alone]]
            found += self._at_once(asks[alone:])
        return found

    def _at_once(self, asks: list[partial[Asked]]) -> list[Asked]:
        with ThreadPoolExecutor(max(1, len(asks))) as pool:
            try:
                return [running.result() for running in [pool.submit(ask) for ask in asks]]
            except BaseException:
                self._client.close()  # the other streams end now, and the pool with them
                raise


def _encode(model: TextModel, messages: Messages) -> list[int]:
    return model.encode_chat([(m["role"], m["content"]) for m in messages])


def _common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _with_shareable(model: TextModel, asked: list[Asked]) -> list[Asked]:
    """How much of each prompt earlier requests left in a cache: the longest common prefix,
    without their last generated token (never fed to the model) and the prompt's own last one."""
    left: list[list[int]] = []
    found = []
    for one in asked:
        prompt = _encode(model, one.messages)
        earlier = left[:1] if one.turn == 1 else left  # turn 1: the others came at once
        most = max((_common(tokens, prompt) for tokens in earlier), default=0)
        found.append(replace(one, shareable=min(most, len(prompt) - 1)))
        if one.turn == 1:
            left.append([*prompt, *one.answer.token_ids][:-1])
    return found


def _text_model(client: Client) -> TextModel:
    name = client.list_models()[0].name
    stub = banyan_stub(client.channel(client.routers.current))
    model = client.text_model(name, stub, Deadline(30.0))
    assert model is not None
    return model


def _cluster() -> ClusterSpec:
    """Two replicas, on GPUs where there are two, else on the CPU: there the compiled path is exact
    and torch computes in fp32, so answers with and without the cache can be compared."""
    device = "auto" if gpus() >= 2 else "cpu"
    name = f"demo-{os.getpid()}"
    return ClusterSpec("demo", name, replicas=2, listen="127.0.0.1:0", device=device)


def run(json_file: str, *, users: int, max_tokens: int) -> None:
    """The whole demo. Raises BanyanError; then too the cluster is gone."""
    if not 1 <= users <= len(USERS):
        raise InvalidRequest(f"--users must be from 1 to {len(USERS)}.")
    spec = _cluster()
    try:
        with output.stages(quiet=False) as report:
            record = launch.up(spec, report)
        with Client(record.addresses, timeout_s=300.0) as client:
            demo = Demo(client, users, max_tokens)
            asked = demo.turn(1, {})
            started_s = (demo.first_token_at or 0.0) - psutil.Process().create_time()
            asked += demo.turn(2, {a.user: a for a in asked})
            with output.console.status("the same prompts without the cache"):
                uncached = demo.again_uncached(asked)
            model = _text_model(client)
            asked = _with_shareable(model, asked)
    finally:
        stop.down(spec.name, drain=False, everything=True)
    _show(asked, uncached)
    report_rows = _report(asked, uncached, started_s)
    if json_file:
        report_rows.write(Path(json_file))
    output.console.print(f"start-up to first token: {started_s:.1f} s")
    _verify(asked)


def _show(asked: list[Asked], uncached: list[Asked]) -> None:
    rows = []
    for one, other in zip(asked, uncached, strict=True):
        usage = one.answer.usage
        rows.append([
            one.user, one.turn, one.answer.replica, usage.prompt_tokens, one.shareable,
            usage.cached_tokens, usage.computed_tokens,
            f"{one.ttft_s * 1e3:.0f} ms", f"{other.ttft_s * 1e3:.0f} ms",
        ])  # fmt: skip
    columns = ["user", ">turn", "replica", ">prompt\ntokens", ">held\nbefore", ">cached"]
    columns += [">computed", ">TTFT", ">TTFT\nno cache"]
    output.table("each request, beside the same one without the cache", columns, rows)
    for one in [a for a in asked if a.turn == 1][1:2]:  # the first with something to share
        output.console.print(_why(one))


def _why(one: Asked) -> str:
    """Why its router sent a request where it went, and what the other replica would have cost."""
    decision = one.answer.decision
    assert decision is not None  # a router's streams end with it
    others = [c for c in decision.candidates if c.replica != decision.replica]
    against = "".join(
        f" ({c.replica}: {c.total_s:.2f} s, {c.matched_tokens} tokens)" for c in others
    )
    return f"why {one.user} went to {decision.replica}: {decision.reason}{against}"


def _computed(asked: list[Asked]) -> int:
    return sum(a.answer.usage.computed_tokens for a in asked)


def _report(asked: list[Asked], uncached: list[Asked], started_s: float) -> Report:
    report = Report()
    report.add(Row("demo.start_to_first_token", started_s, "s", 1))
    for turn in (1, 2):
        with_cache = [a.ttft_s for a in asked if a.turn == turn]
        without = [a.ttft_s for a in uncached if a.turn == turn]
        report.add(
            Row(f"demo.ttft_turn_{turn}", median(with_cache), "s", len(with_cache),
                "no_cache", median(without))
        )  # fmt: skip
    report.add(
        Row("demo.computed_tokens", _computed(asked), "tokens", len(asked),
            "no_cache", _computed(uncached))
    )  # fmt: skip
    same = sum(
        a.answer.token_ids == b.answer.token_ids for a, b in zip(asked, uncached, strict=True)
    )
    report.add(Row("demo.same_answers", same, "answers", len(asked), "all", len(asked)))
    total, base = _computed(asked), _computed(uncached)
    first, second = report.rows[1], report.rows[2]
    output.console.print(
        f"computed {total} prompt tokens instead of {base} ({1 - total / base:.0%} saved); median "
        f"TTFT turn 1: {first.value:.2f} s instead of {first.against_value:.2f} s, turn 2: "
        f"{second.value:.2f} s instead of {second.against_value:.2f} s; "
        f"{same} of {len(asked)} answers identical"
    )
    return report


def _verify(asked: list[Asked]) -> None:
    """Raise InternalError if the counts do not add up or something held was recomputed."""
    for one in asked:
        usage = one.answer.usage
        if usage.cached_tokens + usage.computed_tokens != usage.prompt_tokens:
            raise InternalError("Cached and computed tokens do not add up to the prompt's.")
    second = [a for a in asked if a.turn == 2]
    short = [a for a in asked if a.answer.usage.cached_tokens < a.shareable]
    whole = [a for a in second if a not in short]
    output.console.print(
        "second turns sent to a replica that holds them, with everything shareable cached: "
        f"[bold]{len(whole)} of {len(second)}[/bold]"
    )
    for one in short:
        decision = one.answer.decision
        if decision is None or decision.chosen_tokens >= decision.available_tokens:
            raise InternalError("A request recomputed what its replica held.")
        output.console.print(f"  {one.user}: {decision.reason}")
