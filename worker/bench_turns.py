"""`python -m worker.bench_turns --model FOLDER --text FILE`: what a conversation's next turn takes.

A first turn all of whose tokens but the last are given, as to a replica that a stream moved to;
then a question behind it. Per policy: seconds to the question's first token with the state that the
first turn left in host memory, beside those without, when all behind the prompt is computed; and
the state's size. On the path that serves (compiled on a CPU where that can be), one request at a
time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from kvstore.objectnames import is_part
from kvstore.tiered import TieredStore
from kvstore.tiers.host import HostTier
from seams.bench import Report, Row
from seams.clock import SystemClock
from worker.calibration.statistics import Statistics
from worker.config import EngineConfig, ReplicaConfig
from worker.engine.core import EngineCore
from worker.engine.messages import EngineRequest, RequestUsage
from worker.engine.retention.policies import Policies
from worker.engine.sampling import SamplingParams
from worker.models.load import load_model

POLICIES = (
    "none",
    "streaming:window={budget},interval={interval}",
    "triattention:budget={budget},interval={interval},window={window}",
)
HOST_BYTES = 1 << 30
QUESTION_TOKENS = 32


class Talk:
    """One engine over host memory, and conversations of one text, told apart by their salts."""

    def __init__(
        self, config: ReplicaConfig, calibration: Path | None, ids: Sequence[int], prompt: int
    ) -> None:
        """Loads the model. Raises what that does."""
        model = load_model(config)
        spec = model.spec
        self._sizes = {group.id: group.block_bytes for group in spec.groups}
        self._host = HostTier(self._sizes, HOST_BYTES, write_back=False)
        known = Statistics.load(calibration, spec.fingerprint) if calibration else None
        blocks = 4 * -(-len(ids) // spec.block_tokens)
        self._core = EngineCore(
            model,
            EngineConfig((blocks,) * len(spec.groups)),
            SystemClock(),
            tiers=TieredStore(self._host),
            retention=Policies(spec, statistics=known),
        )
        self._ids, self._prompt = ids, prompt
        self._conversations = 0

    def turns(self, policy: str) -> tuple[float, int]:
        """A first turn, then the next: seconds to that one's first token, and how many of its
        tokens were not computed."""
        self._conversations += 1
        self._host.clear()
        self._run(self._ids[:-QUESTION_TOKENS], self._prompt, policy)
        began_s = time.perf_counter()
        usage = self._run(self._ids, len(self._ids), policy)
        return time.perf_counter() - began_s, usage.cached_tokens

    def state_bytes(self) -> int:
        """Of what the last conversation's two turns left, on average."""
        held = [name for name in self._host.names() if is_part(name)]
        return sum(self._sizes[name.group] for name in held) // 2

    def _run(self, ids: Sequence[int], prompt: int, policy: str) -> RequestUsage:
        """Behind these ids, of which `prompt` are the prompt, one token."""
        name = f"{self._conversations} {len(ids)}"
        salt = str(self._conversations).encode().ljust(32)
        params = SamplingParams(seed=0, max_tokens=len(ids) - prompt + 1, ignore_eos=True)
        self._core.submit(
            EngineRequest(name, tuple(ids), prompt, params, salt=salt, retention=policy)
        )
        while True:
            output = self._core.step()
            for emission in output.emissions if output else ():
                if emission.error is not None:
                    raise emission.error
                if emission.last and emission.usage is not None:
                    return emission.usage


def rows_of(talk: Talk, policy: str, rounds: int) -> Iterator[Row]:
    """The figures of one policy, medians of so many conversations."""
    without_s = [talk.turns(policy)[0] for _ in range(rounds)]
    if policy == "none":
        yield Row("next turn, all kept and cached", median(without_s), "s", rounds)
        return
    found = [talk.turns(f"{policy},resume") for _ in range(rounds)]
    with_s = median(seconds for seconds, _ in found)
    against = ("without the state", median(without_s))
    yield Row(f"next turn, {policy}", with_s, "s", rounds, *against)
    cached = median(tokens for _, tokens in found)
    yield Row(f"not computed, {policy}", cached, "tokens", rounds)
    yield Row(f"state, {policy}", talk.state_bytes() / (1 << 20), "MiB", rounds)


def main() -> None:
    """Print the table; `--json FILE` writes it too."""
    parser = argparse.ArgumentParser(prog="python -m worker.bench_turns", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a model folder")
    parser.add_argument("--text", type=Path, required=True, help="the conversation")
    parser.add_argument("--calibration", type=Path, help="of `banyan calibrate`")
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, from its beginning")
    parser.add_argument("--prompt", type=int, default=256, help="how many of them are the prompt")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--window", type=int, default=128)
    parser.add_argument("--compute", default="auto", help="auto, compiled or torch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    ids = tokenizer.encode(options.text.read_text()).ids[: options.tokens]
    config = ReplicaConfig(
        replica="bench", model=str(options.model), served_name="bench", routers=(), secret_file="",
        device="cpu", compute=options.compute,
    )  # fmt: skip
    talk = Talk(config, options.calibration, ids, options.prompt)
    report = Report()
    for template in POLICIES:
        policy = template.format(**vars(options))
        if "triattention" in policy and not options.calibration:
            continue
        for row in rows_of(talk, policy, options.rounds):
            report.add(row)
            print(f"{row.name}: {row.value:.4g} {row.unit}", file=sys.stderr, flush=True)
    report.show(options.json)


if __name__ == "__main__":
    main()
