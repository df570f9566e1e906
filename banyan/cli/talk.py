"""`banyan generate | chat | explain`: the client, shown."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from banyan.cli import output
from banyan.client import Client
from banyan.cluster import ray_head, state
from banyan.events import ChoiceFinished, Collector, Completion, Decision, Delta
from banyan.wire import Prompt
from seams.errors import InvalidRequest

CANDIDATES_SHOWN = 4


@dataclass(frozen=True)
class Target:
    """Which cluster to talk to: addresses, or the name of one started here."""

    name: str
    address: str
    api_key: str
    timeout_s: float

    def resolve(self) -> tuple[str, str]:
        """Router addresses (comma between) and API key. Raises LaunchError if there is none."""
        if self.address:
            return self.address, self.api_key
        record = state.running(self.name)
        return ",".join(record.addresses), self.api_key or record.api_key

    def client(self) -> Client:
        """A client for it. Raises LaunchError if no such cluster runs."""
        addresses, api_key = self.resolve()
        return Client(addresses, api_key, self.timeout_s or None)


def messages(system: str, user: str) -> list[dict[str, str]]:
    """A chat's first turn."""
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": user}]


def _stream(
    client: Client, prompt: Prompt, options: dict[str, Any], *, direct: bool, show: bool
) -> tuple[Completion, float]:
    """The whole answer and its time to first token; prints the text as it comes if `show`."""
    began, first_s = time.monotonic(), 0.0
    with client.generate(prompt, direct=direct, **options) as stream:
        collector = Collector(stream.progress.choices)
        for event in stream:
            collector.add(event)
            if isinstance(event, Delta) and not first_s:
                first_s = time.monotonic() - began
            if show and isinstance(event, Delta | ChoiceFinished):
                sys.stdout.write(event.text)
                sys.stdout.flush()
    if show:
        sys.stdout.write("\n")
    return collector.completion(), first_s


def _summary(answer: Completion, first_s: float) -> str:
    usage = answer.usage
    return (
        f"[dim]{answer.replica}: {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached,"
        f" {usage.computed_tokens} computed, {usage.completion_tokens} generated,"
        f" first after {first_s * 1000:.0f} ms · {answer.started.request_id}[/dim]"
    )


def _as_json(answer: Completion, first_s: float) -> dict[str, Any]:
    return {
        "request_id": answer.started.request_id,
        "model": answer.started.model,
        "replica": answer.replica,
        "seed": answer.started.seed,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason.name.lower(),
        "usage": asdict(answer.usage),
        "ttft_s": first_s,
        "decision": asdict(answer.decision) if answer.decision else None,
    }


def generate(
    target: Target, prompt: Prompt, options: dict[str, Any], *, direct: bool, json_output: bool
) -> None:
    """One answer."""
    with target.client() as client:
        answer, first_s = _stream(client, prompt, options, direct=direct, show=not json_output)
    if json_output:
        output.print_json(_as_json(answer, first_s))
    else:
        output.errors.print(_summary(answer, first_s))


def chat(target: Target, system: str, options: dict[str, Any], *, json_output: bool) -> None:
    """Turn by turn; with JSON, one line per turn."""
    history = [{"role": "system", "content": system}] if system else []
    with target.client() as client:
        while True:
            try:
                said = input("" if json_output or not sys.stdin.isatty() else "you> ").strip()
            except EOFError:
                return
            if not said:
                return
            history.append({"role": "user", "content": said})
            answer, first_s = _stream(client, history, options, direct=False, show=not json_output)
            history.append({"role": "assistant", "content": answer.text})
            if json_output:
                print(json.dumps(_as_json(answer, first_s)), flush=True)
            else:
                output.errors.print(_summary(answer, first_s))


def explain(target: Target, request_id: str, prompt: str, model: str, *, json_output: bool) -> None:
    """One decision. Raises InvalidRequest if neither an id nor a prompt was given."""
    if not request_id and not prompt:
        raise InvalidRequest("Give a request id, or --prompt TEXT.")
    with target.client() as client:
        decision = (
            client.explain(request_id) if request_id else client.explain(prompt=prompt, model=model)
        )
    if json_output:
        output.print_json(asdict(decision))
        return
    _show_decision(decision)


def bench(target: Target, options: list[str]) -> NoReturn:
    """Become the load generator, pointed at the cluster."""
    addresses, api_key = target.resolve()
    command = [sys.executable, "-m", "loadtest", "--address", addresses, *options]
    env = ray_head.environment()
    if api_key:
        env["BANYAN_API_KEY"] = api_key  # arguments can be read by every user of the machine
    os.execve(sys.executable, command, env)


def _show_decision(decision: Decision) -> None:
    delivered = decision.delivered_tokens
    told = "not reported yet" if delivered is None else str(delivered)
    output.console.print(f"{decision.replica}: {decision.reason}")
    output.console.print(
        f"of {decision.prompt_tokens} prompt tokens the best holder has "
        f"{decision.available_tokens}, the picked one {decision.chosen_tokens}; reused: {told}"
    )
    shown = decision.candidates[:CANDIDATES_SHOWN]  # a column each: the cheapest are first
    costs = [dict(c.terms) for c in shown]
    names = dict.fromkeys(name for terms in costs for name in terms)
    rows: list[list[object]] = [["tokens held", *(c.matched_tokens for c in shown)]]
    for name in names:
        if any(terms.get(name) for terms in costs):  # what costs nothing anywhere says nothing
            rows.append([f"{name}, ms", *(f"{t.get(name, 0.0) * 1e3:,.1f}" for t in costs)])
    rows.append(["[bold]total, ms[/bold]", *(f"{c.total_s * 1e3:,.1f}" for c in shown)])
    output.table("", ["", *(f">{c.replica}" for c in shown)], rows)
