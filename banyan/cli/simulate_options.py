"""The options of `banyan simulate`; what they do is in banyan/cli/simulate.py, imported on use."""

from __future__ import annotations

from typing import Annotated

import typer


def simulate(
    trace: Annotated[
        str, typer.Option(help="Mooncake's or Azure's format; default: made-up chats.")
    ] = "",
    requests: Annotated[int, typer.Option(help="Only the first so many; 0 = all.")] = 0,
    replicas: Annotated[int, typer.Option(help="How many replicas.")] = 8,
    routers: Annotated[int, typer.Option(help="Unsynchronised routers.")] = 1,
    policies: Annotated[str, typer.Option(help="Names, comma between, or all.")] = "cost",
    load: Annotated[
        list[float] | None, typer.Option(help="Share of the saturation; may be repeated.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests a second instead; 0 = the trace's.")] = 0.0,
    saturation: Annotated[float, typer.Option(help="Requests a second; 0 = find it.")] = 0.0,
    seeds: Annotated[int, typer.Option(help="Runs of each policy and load.")] = 1,
    capacity: Annotated[float, typer.Option(help="Device blocks of all, by unique ones.")] = 0.2,
    host: Annotated[float, typer.Option(help="Host tier of all replicas, likewise.")] = 0.0,
    wrong_prefill: Annotated[float, typer.Option(help="Tell `cost` prompts take so much.")] = 1.0,
    wrong_step: Annotated[float, typer.Option(help="Tell `cost` steps take so much.")] = 1.0,
    kill: Annotated[
        list[str] | None, typer.Option(help="SECONDS:REPLICA that dies then; may be repeated.")
    ] = None,
    join: Annotated[
        list[float] | None, typer.Option(help="Seconds at which one more comes; repeatable.")
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also one more replica, and twice the host tier.")
    ] = False,
    grid: Annotated[
        bool, typer.Option("--grid", help="Capacities, routers and loads crossed; says who wins.")
    ] = False,
    slo_ttft: Annotated[float, typer.Option(help="Goodput: seconds to the first token.")] = 5.0,
    slo_itl: Annotated[float, typer.Option(help="Goodput: mean seconds between tokens.")] = 0.05,
    fit: Annotated[str, typer.Option(help="Take constants from a recorded run; compare.")] = "",
    record: Annotated[str, typer.Option(help="Load a live cluster; write that run there.")] = "",
    jobs: Annotated[int, typer.Option(help="Processes.")] = 1,
    more: Annotated[bool, typer.Option("--more", help="All figures, not the headline's.")] = False,
    json_file: Annotated[str, typer.Option("--json", help="Write the figures there.")] = "",
    plot: Annotated[str, typer.Option(help="Write a page with bars there.")] = "",
    name: Annotated[
        str, typer.Option(help="Which cluster to record.", envvar="BANYAN_CLUSTER")
    ] = "default",
    address: Annotated[str, typer.Option(help="HOST:PORT of its routers, comma between.")] = "",
    api_key: Annotated[
        str, typer.Option(help="API key.", envvar="BANYAN_API_KEY", show_default=False)
    ] = "",
) -> None:
    """Simulate a cluster: policies, replicas, routers and tiers on a trace, without any model."""
    from banyan.cli import simulate as command
    from banyan.cli import talk
    from simulate.outcome import Slo

    if record:
        command.record(talk.Target(name, address, api_key, 0.0), record)
        return
    asked = command.Asked(
        trace=trace, requests=requests, replicas=replicas, routers=routers, policies=policies,
        loads=tuple(load or ()), rate=rate, saturation=saturation, seeds=seeds, capacity=capacity,
        host=host, wrong_prefill=wrong_prefill, wrong_step=wrong_step, kill=tuple(kill or ()),
        join=tuple(join or ()), what_if=what_if, grid=grid, run=fit, slo=Slo(slo_ttft, slo_itl),
        jobs=jobs, json_file=json_file, page=plot, more=more,
    )  # fmt: skip
    command.run(asked)
