"""guidellm: synthetic prompts behind shared prefixes, at Poisson arrivals. Knows no cluster."""

from __future__ import annotations

import json
from pathlib import Path

from base import HUB_NAME, TORCH, Client, Said, Site

REPORT = "report.json"
REQUESTS, RATE_HZ = 12, 1
DATA = {
    "kind": "synthetic_text",
    "prompt_tokens": 64,
    "output_tokens": 16,
    "prefix_buckets": [{"prefix_count": 2, "prefix_tokens": 256}],
}


def command(site: Site) -> list[str]:
    """See Client. HTTP/2 is off: without TLS nothing could agree on it."""
    backend = f"kind=openai_http,target={site.url},model={site.model},http2=false"
    return [
        "guidellm", "run", "--backend", backend, "--profile", f"kind=poisson,rate={RATE_HZ}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={HUB_NAME}", "--data", json.dumps(DATA),
        "--output", f"kind=json,path={site.folder / REPORT}", "--disable-progress",
    ]  # fmt: skip


def read(folder: Path) -> Said:
    """See Client. Its ITL is per token and counts none for the first, as our TPOT does;
    here all answers have the same length. Cached tokens stand with each request."""
    (bench,) = json.loads((folder / REPORT).read_text())["benchmarks"]
    metrics, totals = bench["metrics"], bench["metrics"]["request_totals"]
    good = bench["requests"]["successful"]
    told = [one for one in good if one["cached_tokens"] is not None]
    prompt_tokens = sum(one["prompt_tokens"] for one in told)
    cached_tokens = sum(one["cached_tokens"] for one in told)
    return Said(
        requests=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        ttft_ms=metrics["time_to_first_token_ms"]["successful"]["mean"],
        tpot_ms=metrics["inter_token_latency_ms"]["successful"]["mean"],
        cached_share=cached_tokens / prompt_tokens if prompt_tokens else None,
    )


POISSON = Client(
    "guidellm poisson", "guidellm", (TORCH, ("guidellm==0.8.1",)), command, read,
    ("prefix-groups", "--rate", str(RATE_HZ), "--sessions", str(REQUESTS), "--groups", "2",
     "--prefix-tokens", "256", "--input-tokens", "64", "--output-tokens", "16", "--warmup", "0"),
)  # fmt: skip
