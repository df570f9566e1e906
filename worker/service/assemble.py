"""From a configuration to a replica ready to start: model, pools, engine. It knows no network."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from seams.clock import SystemClock
from seams.errors import InvalidRequest, LaunchError, ModelLoadError
from seams.proof import read_secret
from seams.textfiles import read_text_files
from worker.config import EngineConfig, ReplicaConfig
from worker.models.base import ModelSpec
from worker.service.advice import pruning_warning
from worker.service.replica import Replica, ReplicaParts
from worker.service.settings import thread_count

if TYPE_CHECKING:
    from worker.engine.retention.policies import Policies

_log = logging.getLogger(__name__)


def _text_files(model: str) -> dict[str, bytes]:
    folder = Path(model)
    if folder.is_file():
        folder = folder.parent  # a GGUF file has them beside it
    if not folder.is_dir():
        return {}  # a fake model: token ids only
    try:
        return read_text_files(folder)
    except OSError:
        raise ModelLoadError("The model's tokenizer files cannot be read.") from None


class LoadProgress:
    """Writes the share of the model that is loaded to a file, at most every percent. A file that
    cannot be written is given up: it only draws a bar."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._percent = -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        if self._path is None or percent == self._percent:
            return
        self._percent = percent
        try:
            self._path.write_text(str(percent / 100))
        except OSError:
            self._path = None


def load_parts(config: ReplicaConfig) -> ReplicaParts:
    """Load the model and build its engine. Raises ModelLoadError, OutOfBlocks or LaunchError."""
    import torch

    from worker.engine.core import EngineCore
    from worker.engine.thread import ThreadEngine
    from worker.models.load import load_model, plan_blocks
    from worker.service.tiers import open_tiers, served_spec

    torch.set_num_threads(thread_count(config.threads))
    model = load_model(config, LoadProgress(config.progress_file))
    blocks = plan_blocks(config, model.spec)
    clock = SystemClock()
    limits = EngineConfig(
        blocks=blocks,
        step_tokens_max=config.step_tokens_max,
        running_max=config.running_max,
        decode_slowdown_max=config.decode_slowdown_max,
        waiting_max=config.waiting_max,
        cache=config.cache,
        speculate=config.speculate,
    )
    text_files = _text_files(config.model)
    tiers = open_tiers(config, model.spec, _host_pool_bytes(config, model.spec, blocks))
    try:
        retention = _policies(config, model.spec)
        engine = ThreadEngine(EngineCore(model, limits, clock, tiers=tiers, retention=retention))
    except BaseException:
        if tiers is not None:
            tiers.close()
        raise
    spec = served_spec(config, model.spec)
    if retention is not None:
        spec = replace(spec, numeric_class=spec.numeric_class + retention.numerics)
    return ReplicaParts(engine, spec, blocks, text_files, clock, tiers)


def _policies(config: ReplicaConfig, spec: ModelSpec) -> Policies | None:
    """What retention the replica offers. Raises LaunchError."""
    from worker.calibration.statistics import Statistics
    from worker.engine.retention.policies import Policies

    if not config.retention:
        return None
    known = None
    if config.calibration:
        known = Statistics.load(Path(config.calibration), spec.fingerprint)
    if warning := pruning_warning(config.kv_codec, config.retention):
        _log.warning("%s", warning)
    try:
        return Policies(spec, config.retention, known)
    except InvalidRequest as error:
        raise LaunchError(f"--retention: {error.message}") from None


def _host_pool_bytes(config: ReplicaConfig, spec: ModelSpec, blocks: tuple[int, ...]) -> int:
    """What the pools, which the engine makes, will take of host memory."""
    from worker.models.load import FAKE, choose_device

    if not config.model.startswith(FAKE) and choose_device(config.device).type != "cpu":
        return 0
    counts = zip(blocks, spec.groups, strict=True)
    return sum(count * group.block_bytes * group.ranks for count, group in counts)


def build_replica(config: ReplicaConfig, on_failure: Callable[[], None] | None = None) -> Replica:
    """A replica ready to `start`. `on_failure` is called if its server or engine fails later on."""
    secret = read_secret(Path(config.secret_file))
    return Replica(config, load_parts(config), secret, on_failure)
