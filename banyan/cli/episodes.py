"""`banyan episodes`: a long conversation's episodes, made before questions about it come. What does
it is in banyan/episodes.py, imported on use."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from banyan.cli.options import Name
from seams.errors import InvalidRequest

if TYPE_CHECKING:
    from banyan.episodes import Built


def episodes(
    model: Annotated[
        str, typer.Argument(help="demo, a folder, a GGUF file, or a Hugging Face id.")
    ],
    conversation: Annotated[
        str, typer.Option(help="JSON messages, or a text whose lines are utterances.")
    ],
    nvme: Annotated[str, typer.Option(help="Directory of the cluster's disk tiers.")] = "",
    nvme_gib: Annotated[float, typer.Option(help="How much of it each replica may take.")] = 0.0,
    replica: Annotated[str, typer.Option(help="With --nvme: whose, which must not run.")] = "",
    redis: Annotated[
        str,
        typer.Option(help="URL of the shared tier, or @FILE with one; default: the cluster's."),
    ] = "",
    ttl_s: Annotated[int, typer.Option(help="With --redis: seconds until they vanish.")] = 7
    * 24
    * 3600,
    count: Annotated[int, typer.Option("--episodes", help="How many.")] = 4,
    budget: Annotated[int, typer.Option(help="Tokens that each keeps.")] = 2048,
    block: Annotated[int, typer.Option(help="Tokens stored beside them, at most.")] = 512,
    window: Annotated[int, typer.Option(help="Utterances of a segment.")] = 4,
    medoids: Annotated[int, typer.Option(help="Segments in a patched prompt.")] = 4,
    sinks: Annotated[int, typer.Option(help="Leading tokens that stay.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the clusters.")] = 42,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As the replicas', as what follows.")] = "auto",
    kv_codec: Annotated[str, typer.Option(help="KV on the device.")] = "model",
    cold_codec: Annotated[str, typer.Option(help="KV off the device.")] = "none",
    tenant: Annotated[str, typer.Option(help="Whose requests may use them.")] = "default",
    name: Name = "default",
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Build a conversation's EpiCache episodes and write them where replicas find them."""
    from banyan import episodes as building
    from banyan.cli import output
    from banyan.cluster import state
    from banyan.cluster.tiers import refuse_password
    from banyan.models import resolve_model

    refuse_password(redis)
    if replica and not nvme:
        raise InvalidRequest("--replica says whose disk tier is meant: it needs --nvme.")
    policy = (
        f"epicache:episodes={count},budget={budget},block={block},window={window},"
        f"medoids={medoids},sinks={sinks},seed={seed}"
    )
    with output.stages(quiet=json_output) as report:
        asked = building.Asked(
            model=resolve_model(model, report),
            conversation=Path(conversation).expanduser(),
            policy=policy,
            secret_file=state.prepare(name) / "secret",
            tenant=tenant,
            namespace=name,
            replica=replica or "replica-0",
            nvme=str(Path(nvme).expanduser().absolute()) if nvme else "",
            nvme_gib=nvme_gib,
            redis=redis or ("" if nvme else _own_redis(name)),
            redis_ttl_s=ttl_s,
            device=device,
            dtype=dtype,
            kv_codec=kv_codec,
            cold_codec=cold_codec,
        )
        built = building.build(asked, report)
    _show(built, json_output=json_output)


def _own_redis(name: str) -> str:
    """Where the URL of the shared tier of this machine's cluster stands; "" if it has none."""
    from banyan.cluster import state
    from banyan.cluster.tiers import URL_FILE
    from seams.urls import FILE_MARK

    record = state.load(name)
    if record is None or not record.redis:
        return ""
    return f"{FILE_MARK}{state.folder(name) / 'run' / URL_FILE}"


def _show(built: Built, *, json_output: bool) -> None:
    from banyan.cli import output

    if json_output:
        output.print_json(asdict(built))
        return
    rows = [
        [number, segments, built.kept_tokens, f"{built.episode_bytes / 2**20:,.1f}"]
        for number, segments in enumerate(built.segments)
    ]
    output.table("", ["episode", ">segments", ">tokens kept", ">MiB"], rows)
    output.console.print(
        f"{built.history_tokens} tokens, at most {built.peak_tokens} stored at once. Ask with "
        f"retention {built.policy}",
        soft_wrap=True,
    )
