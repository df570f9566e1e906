"""`banyan bench ...`: the options of load tests. What measures is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from banyan.cli.options import Address, ApiKey, Name
from seams.errors import InvalidRequest

bench_app = typer.Typer(help="Load a cluster, or any OpenAI endpoint, and measure.")

Count = Annotated[int | None, typer.Option(min=1)]
JsonFile = Annotated[str, typer.Option("--json", help="Write the figures to this file.")]
WorkloadName = Annotated[
    str, typer.Argument(help="random, prefix-groups, chat, agent, rag or trace.")
]
To = Annotated[
    str, typer.Option("--target", help="grpc or http: the cluster's own; or URL of an OpenAI API.")
]
Kind = Annotated[
    str, typer.Option(help="closed, constant, poisson, gamma or schedule; default: what fits.")
]
Concurrency = Annotated[int, typer.Option(help="Sessions at once, in a closed loop.")]
Rate = Annotated[str, typer.Option(help="Sessions per second; several with commas: a sweep.")]
Search = Annotated[
    bool,
    typer.Option("--search", help="Find the greatest rate that meets --slo, beginning at --rate."),
]
RateMax = Annotated[float, typer.Option(help="Of a search; 0 = 64 times --rate.")]
Precision = Annotated[float, typer.Option(help="Of a search: 0.1 ends within a tenth.")]
SloText = Annotated[str, typer.Option("--slo", help="For example ttft:500ms,tpot:50ms.")]
Attainment = Annotated[float, typer.Option(help="Share of requests that has to meet it.")]
Cv = Annotated[float, typer.Option(help="Of gamma's gaps; above 1 they come in bursts.")]
Speed = Annotated[float, typer.Option(help="A trace's schedule, so many times as fast.")]
Sessions = Annotated[int, typer.Option(help="Per stage; 0 = 64, or what --duration-s gives.")]
DurationS = Annotated[float, typer.Option(help="No session begins later; 0 = no limit.")]
Warmup = Annotated[int, typer.Option(help="Sessions before, with other texts, that do not count.")]
Seed = Annotated[int, typer.Option(help="Of texts, lengths and arrivals.")]
Turns = Annotated[int, typer.Option(help="Of a chat, a rag session, or rounds of an agent.")]
Groups = Annotated[int, typer.Option(help="With a prefix of their own.")]
Branches = Annotated[int, typer.Option(help="Calls at once of an agent.")]
Documents = Annotated[int, typer.Option(help="Of rag, in all.")]
PerQuestion = Annotated[int, typer.Option(help="Documents in a rag prompt.")]
Prefix = Annotated[int, typer.Option(help="Tokens that a group shares.")]
DocumentTokens = Annotated[int, typer.Option(help="Tokens of a document.")]
Input = Annotated[int, typer.Option(help="Tokens that a turn says.")]
Output = Annotated[int, typer.Option(help="Tokens of an answer.")]
SpreadOf = Annotated[float, typer.Option("--spread", help="0.5: lengths from half to 1.5 times.")]
Skew = Annotated[float, typer.Option(help="Zipf exponent of groups and documents; 0 = all alike.")]
ThinkS = Annotated[float, typer.Option(help="Seconds before a later turn, or that a tool takes.")]
TraceFile = Annotated[str, typer.Option(help="Mooncake's .jsonl or Azure's .csv; may be .gz.")]
Scale = Annotated[float, typer.Option(help="A trace's lengths are divided by it.")]
Text = Annotated[str, typer.Option(help="A file whose words to use in place of made-up ones.")]
TokenizerOf = Annotated[
    str, typer.Option(help="A model's folder, or words; default: the target's own.")
]
FormName = Annotated[str, typer.Option("--form", help="How prompts go out: chat, text or ids.")]
StopAtEos = Annotated[
    bool, typer.Option("--stop-at-eos", help="Let answers end early; not asked to ignore the end.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Banyan's gRPC: without its cache.")]
Model = Annotated[str, typer.Option(help="Default: the only one served.")]
TimeoutS = Annotated[float, typer.Option(help="For each request.")]
Out = Annotated[
    str, typer.Option(help="Folder for requests.jsonl, report.html, .svg, .json and requests.csv.")
]
Place = Annotated[str, typer.Argument(help="A folder of --out, or its requests.jsonl.")]
Measured = Annotated[str, typer.Option(help="demo, a folder, a GGUF file, or a Hugging Face id.")]
Texts = Annotated[
    list[str] | None,
    typer.Option("--text", help="A file to read; repeatable. Default: texts of this machine."),
]
Learnt = Annotated[
    str, typer.Option(help="Of `banyan calibrate`; default: learnt from other texts than measured.")
]
Codecs = Annotated[str, typer.Option(help="Names as for --kv-codec, space between.")]
Contexts = Annotated[str, typer.Option(help="Tokens, comma between; default: 2048,8192.")]
Only = Annotated[
    str,
    typer.Option(help="combinations, sweep, steps, retention, foretold, pools; default: all."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Two minutes in place of half an hour.")]
ReportFolder = Annotated[str, typer.Option(help="Folder for report.html, .svg and .json.")]


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    name: Name = "default",
    address: Address = "",
    api_key: ApiKey = "",
    users: Count = None,
    groups: Count = None,
    turns: Count = None,
    system_words: Count = None,
    question_words: Count = None,
    max_tokens: Count = None,
    concurrency: Count = None,
    seed: Annotated[int | None, typer.Option()] = None,
    json_file: JsonFile = "",
) -> None:
    """Load a cluster, or any OpenAI endpoint, and measure.

    Without a command: chats with shared prefixes on a running cluster, with its cache and without.
    """
    given = {
        "--users": users, "--groups": groups, "--turns": turns, "--system-words": system_words,
        "--question-words": question_words, "--max-tokens": max_tokens,
        "--concurrency": concurrency, "--seed": seed, "--json": json_file or None,
    }  # fmt: skip
    options = {flag: str(value) for flag, value in given.items() if value is not None}
    if context.invoked_subcommand is not None:
        sources = [context.get_parameter_source(option) for option in ("name", "api_key")]
        early = any(source is not None and source.name == "COMMANDLINE" for source in sources)
        if options or address or early:
            word = context.invoked_subcommand
            raise InvalidRequest(f"Give the options of bench {word} after the word {word}.")
        return
    from banyan.cli import talk

    target = talk.Target(name, address, api_key, 0.0)
    talk.bench(target, [part for pair in options.items() for part in pair])


@bench_app.command()
def run(
    workload: WorkloadName = "prefix-groups",
    target: To = "grpc",
    arrivals: Kind = "",
    concurrency: Concurrency = 8,
    rate: Rate = "",
    search: Search = False,
    rate_max: RateMax = 0.0,
    precision: Precision = 0.1,
    slo: SloText = "",
    attainment: Attainment = 0.9,
    cv: Cv = 2.0,
    speed: Speed = 1.0,
    sessions: Sessions = 0,
    duration_s: DurationS = 0.0,
    warmup: Warmup = 2,
    seed: Seed = 1,
    turns: Turns = 3,
    groups: Groups = 4,
    branches: Branches = 3,
    documents: Documents = 16,
    documents_per_question: PerQuestion = 1,
    prefix_tokens: Prefix = 256,
    document_tokens: DocumentTokens = 512,
    input_tokens: Input = 64,
    output_tokens: Output = 32,
    spread: SpreadOf = 0.0,
    skew: Skew = 0.0,
    think_s: ThinkS = 0.0,
    trace: TraceFile = "",
    scale: Scale = 1.0,
    text: Text = "",
    tokenizer: TokenizerOf = "",
    form: FormName = "chat",
    stop_at_eos: StopAtEos = False,
    no_cache: NoCache = False,
    model: Model = "",
    timeout_s: TimeoutS = 300.0,
    out: Out = "",
    json_file: JsonFile = "",
    name: Name = "default",
    address: Address = "",
    api_key: ApiKey = "",
) -> None:
    """Measure one workload: latencies, throughput, cached tokens, goodput."""
    from banyan.cli import load, talk
    from loadtest.workloads.base import Shape

    shape = Shape(
        turns, groups, branches, documents, documents_per_question, prefix_tokens,
        document_tokens, input_tokens, output_tokens, spread, skew, think_s,
    )  # fmt: skip
    arriving = load.arrivals(arrivals, workload, rate, cv, speed, concurrency)
    plan = load.plan(
        workload, arriving, shape, rate=rate, search=search, rate_max_hz=rate_max,
        precision=precision, slo=slo, attainment=attainment, sessions=sessions,
        duration_s=duration_s, warmup=warmup, seed=seed, timeout_s=timeout_s, trace=trace,
        scale=scale,
    )  # fmt: skip
    cluster = talk.Target(name, address, api_key, 0.0)
    asked = load.Asked(cluster, target, model, form, not stop_at_eos, no_cache, tokenizer, text)
    load.run(plan, asked, out, json_file)


@bench_app.command()
def compare(
    a: Place,
    b: Place,
    json_file: JsonFile = "",
    seed: Annotated[int, typer.Option(help="Of the resampling.")] = 1,
) -> None:
    """Ratios of the figures of run B to those of run A, with 95 % intervals."""
    from banyan.cli import load

    load.compare(a, b, json_file, seed)


@bench_app.command()
def compression(
    model: Measured = "demo",
    text: Texts = None,
    calibration: Learnt = "",
    codecs: Codecs = "",
    contexts: Contexts = "",
    only: Only = "",
    quick: Quick = False,
    out: ReportFolder = "",
    json_file: JsonFile = "",
) -> None:
    """What KV codecs and retention cost a model, and what they buy. Needs no cluster."""
    from banyan.cli import compression as command

    asked = command.Asked(
        model, tuple(text or ()), calibration, codecs, contexts, only, quick, out, json_file
    )
    command.run(asked)


@bench_app.command()
def report(measured: Place) -> None:
    """Make the report of a run again from its requests.jsonl, whether or not it came to its end."""
    from banyan.cli import load

    load.report(measured)
