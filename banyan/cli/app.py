"""The commands, their options, and how every error becomes one sentence and an exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from banyan.cli.bench import bench_app
from banyan.cli.episodes import episodes
from banyan.cli.options import Address, ApiKey, Name
from banyan.cli.simulate_options import simulate
from seams.errors import BanyanError

app = typer.Typer(
    help="Banyan: a distributed, cache-aware serving cluster for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Get models onto this machine.", no_args_is_help=True)
app.add_typer(model_app, name="model")
cache_app = typer.Typer(help="Disk tiers, the shared tier, resets.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.add_typer(bench_app, name="bench")
app.command("simulate")(simulate)
app.command("episodes")(episodes)

INTERRUPTED = 130  # what shells and Typer say for SIGINT

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables and text.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate; 0 = to the context's end.")]
Temperature = Annotated[float, typer.Option(help="0 = greedy.")]
Nvme = Annotated[str, typer.Option(help="Directory of disk tiers; default: the cluster's.")]
Redis = Annotated[
    str, typer.Option(help="URL of the shared tier, or @FILE with it; default: the cluster's.")
]
TimeoutS = Annotated[float, typer.Option(help="Seconds for the whole call; 0 = no limit.")]
Retention = Annotated[
    str, typer.Option(help="Which tokens stay in KV, e.g. streaming:sinks=4,window=1024; '' = all.")
]
SecretFile = Annotated[str, typer.Option(help="The cluster's secret; default: as started here.")]
Calibration = Annotated[str, typer.Option(help="For --retention and OSCAR: of `banyan calibrate`.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        from banyan import __version__

        print(f"banyan {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Banyan: a distributed, cache-aware serving cluster for large language models."""


@app.command()
def up(
    model: Annotated[
        str, typer.Option(help="demo, a folder, a GGUF file, or a Hugging Face id.")
    ] = "demo",
    replicas: Annotated[int, typer.Option(help="How many replicas.")] = 1,
    routers: Annotated[int, typer.Option(help="How many routers.")] = 1,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT of the first router; the others take the next ports.")
    ] = "127.0.0.1:7600",
    http: Annotated[
        str, typer.Option(help="HOST:PORT for OpenAI clients, or a loopback PORT; as above.")
    ] = "",
    metrics: Annotated[
        str, typer.Option(help="HOST:PORT for Prometheus, or a loopback PORT; routers as above.")
    ] = "",
    name: Name = "default",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (as stored), bf16, fp16 or fp32.")] = "auto",
    compute: Annotated[str, typer.Option(help="auto, compiled (CPUs only) or torch.")] = "auto",
    batch_invariant: Annotated[
        bool, typer.Option(help="Refuse to serve where a batch could change a bit of an answer.")
    ] = False,
    pool_gib: Annotated[float, typer.Option(help="KV memory per replica; 0 = automatic.")] = 0.0,
    context_tokens: Annotated[int, typer.Option(help="0 = the model's.")] = 0,
    speculate: Annotated[
        int, typer.Option(help="Tokens guessed ahead from a request's own text; 0 = none.")
    ] = 0,
    ray_address: Annotated[
        str, typer.Option(help="Join this Ray cluster (its token in RAY_AUTH_TOKEN).")
    ] = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=FOLDER of a LoRA adapter, served as MODEL:NAME; repeatable."),
    ] = None,
    host_gib: Annotated[float, typer.Option(help="Host memory for KV, per replica.")] = 0.0,
    nvme: Annotated[str, typer.Option(help="Directory for KV on disk; survives restarts.")] = "",
    nvme_gib: Annotated[float, typer.Option(help="How much of it, per replica.")] = 0.0,
    redis: Annotated[
        str, typer.Option(help="KV for all replicas: none, embedded, a URL, or @FILE with one.")
    ] = "none",
    cold_codec: Annotated[
        str, typer.Option(help="KV off the device: none, fp8 or turboquant4.")
    ] = "none",
    kv_codec: Annotated[
        str, typer.Option(help="KV on the device: model, fp8, turboquant:k4v4 or oscar.")
    ] = "model",
    retention: Retention = "",
    calibration: Calibration = "",
    api_keys: Annotated[str, typer.Option(help="JSON file of API keys and their tenants.")] = "",
    timeout_s: Annotated[float, typer.Option(help="Give up after this many seconds.")] = 300.0,
    json_output: Json = False,
) -> None:
    """Start a cluster and wait until every replica is ready at every router."""
    from banyan.cli import clusters
    from banyan.cluster.spec import ClusterSpec, read_api_keys
    from banyan.cluster.tiers import refuse_password

    refuse_password(redis)
    spec = ClusterSpec(
        model=model, name=name, replicas=replicas, routers=routers, listen=listen,
        http=http, metrics=metrics, device=device, dtype=dtype, compute=compute,
        batch_invariant=batch_invariant, pool_gib=pool_gib or None,
        context_tokens=context_tokens, speculate=speculate,
        ray_address=ray_address, timeout_s=timeout_s,
        api_keys=read_api_keys(Path(api_keys)) if api_keys else {},
        adapters=tuple(adapter or ()), host_gib=host_gib, nvme=nvme, nvme_gib=nvme_gib,
        redis="" if redis == "none" else redis, cold_codec=cold_codec, kv_codec=kv_codec,
        retention=retention, calibration=calibration,
    )  # fmt: skip
    clusters.up(spec, json_output=json_output)


@app.command()
def down(
    name: Name = "default",
    now: Annotated[bool, typer.Option("--now", help="Do not let running requests end.")] = False,
    json_output: Json = False,
) -> None:
    """Stop a cluster: drain it, end its processes, check that none is left. Safe to repeat."""
    from banyan.cli import clusters

    clusters.down(name, drain=not now, json_output=json_output)


@app.command()
def status(name: Name = "default", json_output: Json = False) -> None:
    """Replicas and routers of a cluster, from any shell."""
    from banyan.cli import clusters

    clusters.status(name, json_output=json_output)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a user's message.")] = False,
    system: Annotated[str, typer.Option(help="System message; implies --chat.")] = "",
    model: Annotated[str, typer.Option(help="Default: the only one served.")] = "",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: Annotated[float, typer.Option(help="0 or 1 = off.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 = off.")] = 0,
    seed: Annotated[int, typer.Option(help="-1 = the router picks one.")] = -1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
    session: Annotated[str, typer.Option(help="Opaque label for soft affinity.")] = "",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do not use the cache.")] = False,
    direct: Annotated[bool, typer.Option("--direct", help="Stream from the replica.")] = False,
    timeout_s: TimeoutS = 0.0,
    name: Name = "default",
    address: Address = "",
    api_key: ApiKey = "",
    json_output: Json = False,
) -> None:
    """Generate once and stream the text."""
    from banyan.cli import talk

    options: dict[str, Any] = {
        "model": model, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p,
        "top_k": top_k, "stop": stop or [], "session": session, "no_cache": no_cache,
    }  # fmt: skip
    if seed >= 0:
        options["seed"] = seed
    text = sys.stdin.read() if prompt == "-" else prompt
    asked = talk.messages(system, text) if chat or system else text
    target = talk.Target(name, address, api_key, timeout_s)
    talk.generate(target, asked, options, direct=direct, json_output=json_output)


@app.command()
def chat(
    system: Annotated[str, typer.Option(help="System message.")] = "",
    model: Annotated[str, typer.Option(help="Default: the only one served.")] = "",
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    timeout_s: TimeoutS = 0.0,
    name: Name = "default",
    address: Address = "",
    api_key: ApiKey = "",
    json_output: Json = False,
) -> None:
    """Talk to the model, turn by turn; an empty line or end of input leaves."""
    from banyan.cli import talk

    options: dict[str, Any] = {
        "model": model, "max_tokens": max_tokens, "temperature": temperature,
    }  # fmt: skip
    talk.chat(
        talk.Target(name, address, api_key, timeout_s), system, options, json_output=json_output
    )


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="A request id, or nothing with --prompt.")] = "",
    prompt: Annotated[str, typer.Option(help="What would be decided for this prompt now.")] = "",
    model: Annotated[str, typer.Option(help="Default: the only one served.")] = "",
    name: Name = "default",
    address: Address = "",
    api_key: ApiKey = "",
    json_output: Json = False,
) -> None:
    """Why a request went where it went: tokens held, and every replica's cost by term."""
    from banyan.cli import talk

    target = talk.Target(name, address, api_key, 30.0)
    talk.explain(target, request_id, prompt, model, json_output=json_output)


@app.command()
def demo(
    json_file: Annotated[str, typer.Option("--json", help="Write the figures to this file.")] = "",
    users: Annotated[int, typer.Option(help="How many users talk at once.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Per answer.")] = 32,
    tiers: Annotated[
        bool, typer.Option("--tiers", help="A conversation back from host, disk and Redis.")
    ] = False,
) -> None:
    """Two replicas, a real model, several users with one system prompt: what caching saves."""
    from banyan.demo import run as run_demo
    from banyan.demo_tiers import run as run_tiers

    if tiers:
        run_tiers(json_file)
        return
    run_demo(json_file, users=users, max_tokens=max_tokens)


@app.command()
def calibrate(
    model: Annotated[
        str, typer.Argument(help="demo, a folder, a GGUF file, or a Hugging Face id.")
    ],
    text: Annotated[str, typer.Option(help="A file of ordinary text.")],
    out: Annotated[str, typer.Option(help="The file to write.")],
    tokens: Annotated[int, typer.Option(help="How many of its tokens, at most.")] = 8192,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Learn what retention policies and codecs need to know of a model, once."""
    from banyan.calibrate import calibrate as learn
    from banyan.cli import output
    from banyan.models import resolve_model

    with output.stages(quiet=False) as report:
        folder = resolve_model(model, report)
    with output.errors.status("reading the text"):
        said = learn(folder, Path(text), Path(out), tokens, device)
    output.console.print(said)


@model_app.command("fetch")
def model_fetch(
    model: Annotated[str, typer.Argument(help="demo, gemma, or a Hugging Face id.")] = "demo",
    json_output: Json = False,
) -> None:
    """Download and convert a model; instant if it is there already."""
    from banyan.cli import output
    from banyan.models import resolve_model

    with output.stages(quiet=json_output) as report:
        folder = resolve_model(model, report)
    if json_output:
        output.print_json({"model": model, "folder": folder})
    else:
        output.console.print(f"{model} is in {folder}")


@cache_app.command("stats")
def cache_stats(
    nvme: Nvme = "", redis: Redis = "", name: Name = "default", json_output: Json = False
) -> None:
    """Count what disk tiers and the shared tier hold."""
    from banyan.cli import cache

    cache.stats(cache.places(nvme, redis, name), json_output=json_output)


@cache_app.command("verify")
def cache_verify(
    nvme: Nvme = "", redis: Redis = "", name: Name = "default", json_output: Json = False
) -> None:
    """Read all of it and check every record as a replica would."""
    from banyan.cli import cache

    cache.verify(cache.places(nvme, redis, name), json_output=json_output)


@cache_app.command("clear")
def cache_clear(
    nvme: Nvme = "", redis: Redis = "", name: Name = "default", json_output: Json = False
) -> None:
    """Remove all of it; directories of running replicas are left alone."""
    from banyan.cli import cache

    cache.clear(cache.places(nvme, redis, name), json_output=json_output)


@cache_app.command("reset")
def cache_reset(
    tiers: Annotated[
        bool, typer.Option("--tiers", help="Also what the tiers below the device hold.")
    ] = False,
    name: Name = "default",
    address: Address = "",
    secret_file: SecretFile = "",
    json_output: Json = False,
) -> None:
    """Let the replicas of a running cluster forget their prefix cache; requests go on."""
    from banyan.cli import cache, talk

    target = talk.Target(name, address, "", 0.0)
    cache.reset(target, secret_file, tiers=tiers, json_output=json_output)


@cache_app.command("key")
def cache_key(name: Name = "default", secret_file: SecretFile = "") -> None:
    """Print the admin key, which `POST /reset_prefix_cache` wants."""
    from banyan.cli import cache

    print(cache.admin_key_of(name, secret_file))


def _interrupted(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


def run() -> None:
    """Run the command line; every BanyanError is one sentence and exit code 1."""
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        app(standalone_mode=True)
    except BanyanError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": error.message, "status": error.status.name}))
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as ended:
        if isinstance(ended, SystemExit) and ended.code != INTERRUPTED:
            raise
        print("interrupted", file=sys.stderr)
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # a call that was cut off can block gRPC's own clean-up for ever
