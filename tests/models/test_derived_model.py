"""The next turn of a pruned conversation on real decoders: over the state that the last one left,
the same bits as in one go; and no state of another calibration, dtype or codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from random_decoders import CPU, compiled, config_of, in_torch, random_weights, token_ids

from kernels.codecs.choose import make_codec
from kernels.codecs.cold import TurboCold
from kernels.codecs.names import parse_codec
from kvstore.groups import Representation
from kvstore.tiered import TieredStore
from kvstore.tiers.host import HostTier
from kvstore.tiers.nvme import NvmeTier
from kvstore.tiers.queue import TierQueue
from seams.clock import SystemClock
from worker.calibration.capture import capture
from worker.config import EngineConfig
from worker.engine.core import EngineCore
from worker.engine.messages import Compacted, EngineRequest, RequestUsage
from worker.engine.promotion import Promoter
from worker.engine.retention.policies import Policies
from worker.engine.sampling import SamplingParams
from worker.models.base import Model
from worker.models.llama import LlamaModel

Promoter.strict = True
CONFIG = config_of("untied")
WEIGHTS = random_weights(CONFIG, torch.bfloat16)
STATISTICS = capture(in_torch(CONFIG, WEIGHTS), CONFIG, token_ids(300, 320, seed=9))
OTHERS = capture(in_torch(CONFIG, WEIGHTS), CONFIG, token_ids(300, 320, seed=8))
FIRST, COUNT, NEXT = 37, 70, 40
UNION = "triattention:budget=24,interval=16,window=8,resume"
HEAD = "triattention:budget=24,interval=16,window=8,select=head,resume"
SNAPKV = "snapkv:budget=24,interval=16,window=8,resume"


def in_codes() -> LlamaModel:
    """The pages are codes."""
    model = in_torch(CONFIG, WEIGHTS)
    name = parse_codec("turboquant:k4v4")
    assert name is not None
    codec = make_codec(name, CONFIG.layers, CONFIG.head_dim, torch.bfloat16, CPU, None)
    assert codec is not None
    model.recode(codec)
    return model


def in_half() -> Model:
    return in_torch(CONFIG, WEIGHTS)


def in_single() -> Model:
    return in_torch(CONFIG, random_weights(CONFIG, torch.float32))


def exact() -> Model:
    return compiled(CONFIG, WEIGHTS)


@dataclass
class Served:
    """One engine of a model over a host tier, and a disk below it where a folder is given."""

    model: Model
    retention: str
    folder: Path | None = None
    cold: bool = False
    statistics: object = STATISTICS
    usage: list[RequestUsage] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.model.spec
        codecs = {0: TurboCold(spec.layouts[0])} if self.cold else {}
        sizes = {
            g.id: codecs[g.id].encoded_bytes if g.id in codecs else g.block_bytes
            for g in spec.groups
        }
        written: Representation = spec.representation
        if self.cold:
            written = replace(written, codec=codecs[0].name)
        lower = []
        if self.folder is not None:
            disk = NvmeTier(self.folder, 64 << 20, written.id, sizes, free_space_floor_bytes=0)
            lower = [TierQueue(disk, threads=1)]
        self.store = TieredStore(HostTier(sizes, 16 << 20, prefault=False), lower, codecs)
        policies = Policies(spec, self.retention, self.statistics)  # type: ignore[arg-type]
        config = EngineConfig(blocks=(60,), poison_freed=True)
        self.core = EngineCore(
            self.model, config, SystemClock(), tiers=self.store, retention=policies
        )
        self.core._times.record = lambda *_: None  # type: ignore[method-assign]
        self.core._times.prefill_s_per_token = 0.01

    def run(
        self, ids: Sequence[int], count: int, prompt_tokens: int | None = None
    ) -> list[tuple[int, float]]:
        """Tokens and logprobs of one generation behind `ids`."""
        given = prompt_tokens or len(ids)
        params = SamplingParams(
            seed=3, max_tokens=count + len(ids) - given, ignore_eos=True, logprobs=0
        )
        self.core.submit(EngineRequest(f"r{len(self.usage)}", tuple(ids), given, params))
        found: list[tuple[int, float]] = []
        ended = False
        while not ended:
            output = self.core.step()
            self.core.check_integrity()
            for emission in output.emissions if output else ():
                assert emission.error is None
                found += [told.chosen for told in emission.logprobs]
                if emission.last:
                    assert emission.usage is not None
                    self.usage.append(emission.usage)
                    ended = True
        return found

    @property
    def total(self) -> Compacted:
        found = self.core.load().compacted
        assert found is not None
        return found

    def close(self) -> None:
        self.core.close(5.0)


def turns(served: Served) -> tuple[list[int], list[tuple[int, float]]]:
    """A first turn, and a second that should go on from it: all tokens before, and what came."""
    prompt = token_ids(FIRST, 320, seed=1)
    first = [token for token, _ in served.run(prompt, COUNT)]
    conversation = [*prompt, *first, *token_ids(9, 320, seed=2)]
    return conversation, served.run(conversation, NEXT)


@pytest.mark.parametrize(
    ("make", "policy"),
    [(exact, UNION), (exact, HEAD), (in_single, SNAPKV), (in_codes, UNION)],
    ids=["union", "head", "snapkv", "codes"],
)
def test_a_next_turn_has_the_bits_of_one_go(
    make: Callable[[], Model], policy: str, tmp_path: Path
) -> None:
    """One go: the whole conversation as what a single generation had given. By way of a disk and
    another engine."""
    served = Served(make(), policy, tmp_path)
    conversation, _ = turns(served)
    assert served.total.objects_resumed == 1
    served.close()
    other = Served(make(), policy, tmp_path)
    resumed = other.run(conversation, NEXT)
    assert other.total.objects_resumed == 1
    assert other.usage[0].cached_tokens >= FIRST + COUNT - 1 - FIRST % 16
    other.close()
    alone = Served(make(), policy)
    whole = alone.run(conversation, NEXT, prompt_tokens=FIRST)
    assert alone.total.objects_resumed == 0 and alone.total.rounds >= 5
    alone.close()
    if make is exact:
        assert resumed == whole
    else:  # chunks of another length may round otherwise
        assert [token for token, _ in resumed] == [token for token, _ in whole]
        drift = max(abs(a[1] - b[1]) for a, b in zip(resumed, whole, strict=True))
        print(f"logprobs within {drift:.1e}")
        assert drift < 1e-3
    plain = Served(make(), policy)
    assert plain.run(conversation, NEXT) != whole, "nothing was pruned that mattered"
    plain.close()


def test_a_state_in_four_bits_is_the_same_wherever_it_comes_from(tmp_path: Path) -> None:
    """The blocks lost something on their way down, once: whoever goes on from them, whenever, gets
    the same bits."""
    served = Served(in_half(), HEAD, tmp_path, cold=True)
    conversation, first = turns(served)
    assert served.total.objects_resumed == 1
    assert served.run(conversation, NEXT) == first
    served.close()
    found = []
    for _ in range(2):  # by way of the disk, the plain prefix too
        other = Served(in_half(), HEAD, tmp_path, cold=True)
        found.append(other.run(conversation, NEXT))
        assert other.total.objects_resumed == 1
        other.close()
    assert found[0] == found[1]
    exactly = Served(in_half(), HEAD)
    kept, whole = turns(exactly)
    exactly.close()
    assert kept == conversation and first != whole
    drift = max(abs(a[0][1] - b[0][1]) for a, b in [(first, whole), (first, found[0])])
    print(f"the first logprob within {drift:.3f}")
    assert drift < 0.5


def test_another_calibration_or_codec_is_no_state(tmp_path: Path) -> None:
    served = Served(exact(), UNION, tmp_path)
    conversation, _ = turns(served)
    served.close()
    calibrated = Served(exact(), UNION, tmp_path, statistics=OTHERS)
    calibrated.run(conversation, 4)
    assert calibrated.total.objects_resumed == 0
    calibrated.close()
    same = Served(exact(), UNION, tmp_path)
    same.run(conversation, 4)
    assert same.total.objects_resumed == 1
    same.close()
    coded = Served(in_half(), UNION, tmp_path, cold=True)
    coded.run(conversation, 4)
    assert coded.total.objects_resumed == 0
    coded.close()
