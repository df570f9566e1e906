"""aiperf: synthetic prompts that draw their prefix from a pool, and a Mooncake trace replayed on
its schedule. Knows no cluster.

The trace's lengths are divided by SCALE, as `banyan bench run trace --scale` divides them, so that
a CPU can keep up: a hash id then names 512 / SCALE tokens.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from base import HUB_NAME, TORCH, Client, Said, Site

TRACE = Path(__file__).parents[2] / "loadtest/traces/mooncake_conversation_1000.jsonl.gz"
HASHED_TOKENS = 512
SCALE = 32
TRACE_REQUESTS = 12
SPEED = 0.25  # a CPU needs more time
REPORT = "profile_export_aiperf.json"
SYNTHETIC = (
    "--concurrency", "2", "--request-count", "16", "--num-prefix-prompts", "2",
    "--prefix-prompt-length", "256", "--isl", "64", "--isl-stddev", "0", "--osl", "16",
    "--osl-stddev", "0",
)  # fmt: skip


def command(site: Site, *load: str) -> list[str]:
    """Its command line with a load. `ignore_eos` gives answers the length that it asks for."""
    return [
        "aiperf", "profile", "--model", site.model, "--url", site.url, "--endpoint-type", "chat",
        "--streaming", "--tokenizer", HUB_NAME, "--extra-inputs", "ignore_eos:true",
        "--extra-inputs", "temperature:0", "--use-server-token-count", "--random-seed", "1",
        "--output-artifact-dir", str(site.folder), "--ui", "none", "--no-gpu-telemetry",
        "--no-server-metrics", "--workers-max", "1", "--record-processors", "1", *load,
    ]  # fmt: skip


def replay(site: Site) -> list[str]:
    """The trace on its own schedule."""
    path = site.folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in scaled(TRACE_REQUESTS)))
    return command(
        site, "--input-file", str(path), "--custom-dataset-type", "mooncake_trace",
        "--fixed-schedule", "--isl-block-size", str(HASHED_TOKENS // SCALE),
    )  # fmt: skip


def scaled(count: int) -> list[dict[str, object]]:
    """The first `count` requests of the trace, shorter and slower."""
    with gzip.open(TRACE, "rt") as lines:
        whole = [json.loads(line) for line, _ in zip(lines, range(count), strict=False)]
    return [
        line
        | {
            "timestamp": round(line["timestamp"] / SPEED),
            "input_length": max(1, line["input_length"] // SCALE),
            "output_length": max(2, line["output_length"] // SCALE),
        }
        for line in whole
    ]


def read(folder: Path) -> Said:
    """See Client."""
    report = json.loads((folder / REPORT).read_text())
    failed = report.get("error_request_count") or {"avg": 0}
    cached = report.get("overall_usage_prompt_cache_read_pct")
    return Said(
        requests=int(report["request_count"]["avg"]),
        failed=int(failed["avg"]),
        ttft_ms=report["time_to_first_token"]["avg"],
        tpot_ms=report["inter_token_latency"]["avg"],
        cached_share=None if cached is None else cached["avg"] / 100,
    )


INSTALLS = (TORCH, ("aiperf==0.13.0",))
SYNTHETIC_POOL = Client(
    "aiperf prefix pool", "aiperf", INSTALLS, lambda site: command(site, *SYNTHETIC), read,
    ("prefix-groups", "--concurrency", "2", "--sessions", "16", "--groups", "2",
     "--prefix-tokens", "256", "--input-tokens", "64", "--output-tokens", "16", "--warmup", "0"),
)  # fmt: skip
MOONCAKE = Client(
    "aiperf mooncake", "aiperf", INSTALLS, replay, read,
    ("trace", "--trace", str(TRACE), "--scale", str(SCALE), "--speed", str(SPEED),
     "--sessions", str(TRACE_REQUESTS), "--warmup", "0"),
)  # fmt: skip
