"""sglang.bench_serving: its generated shared prefixes, over OpenAI's HTTP. Knows no cluster.

Only the bench is installed: SGLang's own requirements are a GPU engine's, so the wheel comes
without them and what the bench imports comes by name.
"""

from __future__ import annotations

import json
from pathlib import Path

from base import TORCH, Client, Said, Site

REPORT = "report.jsonl"
GROUPS, PROMPTS, RATE_HZ = 2, 6, 1
IMPORTED = (
    "transformers==5.19.0", "aiohttp", "msgspec", "numpy", "orjson", "requests", "tqdm",
    "pybase64", "pillow", "datasets", "psutil", "pyzmq", "setproctitle", "fastapi", "pydantic",
    "uvicorn", "uvloop", "packaging", "triton", "prometheus-client", "openai", "python-multipart",
    "ipython", "partial_json_parser", "anthropic", "einops", "dill", "regex", "scipy",
    "apache-tvm-ffi==0.1.11", "sentencepiece==0.2.1", "tiktoken", "llguidance",
    "compressed-tensors==0.18.0", "gguf", "interegular", "soundfile", "openai-harmony==0.0.4",
    "nvidia-ml-py", "watchfiles", "python-dateutil", "distro", "easydict",
)  # fmt: skip


def command(site: Site) -> list[str]:
    """See Client. Nothing goes first, so that all that passes is counted."""
    return [
        "python", "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat", "--base-url",
        site.url, "--model", site.model, "--tokenizer", str(site.tokenizer),
        "--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(GROUPS),
        "--gsp-prompts-per-group", str(PROMPTS), "--gsp-system-prompt-len", "256",
        "--gsp-question-len", "64", "--gsp-output-len", "16", "--num-prompts",
        str(GROUPS * PROMPTS), "--request-rate", str(RATE_HZ), "--warmup-requests", "0",
        "--seed", "1", "--disable-tqdm", "--cache-report", "--output-file",
        str(site.folder / REPORT),
    ]  # fmt: skip


def read(folder: Path) -> Said:
    """See Client. It takes cached tokens from an extension of SGLang's alone and says 0 to all
    others, so 0 is taken for silence."""
    report = json.loads((folder / REPORT).read_text().splitlines()[-1])
    cached_tokens = report.get("total_cached_tokens") or 0
    return Said(
        requests=report["completed"],
        failed=GROUPS * PROMPTS - report["completed"],
        ttft_ms=report["mean_ttft_ms"],
        tpot_ms=report["mean_tpot_ms"],
        cached_share=cached_tokens / report["total_input_tokens"] if cached_tokens else None,
    )


SHARED_PREFIX = Client(
    "sglang shared prefix", "sglang",
    (TORCH, IMPORTED, ("torchvision",), ("--no-deps", "sglang==0.5.23")), command, read,
    ("prefix-groups", "--rate", str(RATE_HZ), "--sessions", str(GROUPS * PROMPTS), "--groups",
     str(GROUPS), "--prefix-tokens", "256", "--input-tokens", "64", "--output-tokens", "16",
     "--warmup", "0"),
)  # fmt: skip
