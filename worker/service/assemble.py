"""From a configuration to a replica ready to start: model, pools, engine. It knows no network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from seams.clock import SystemClock
from seams.errors import ModelLoadError
from seams.proof import read_secret
from seams.textfiles import read_text_files
from worker.config import EngineConfig, ReplicaConfig
from worker.service.replica import Replica, ReplicaParts
from worker.service.settings import thread_count


def _text_files(model: str) -> dict[str, bytes]:
    folder = Path(model)
    if not folder.is_dir():
        return {}  # a fake model: token ids only
    try:
        return read_text_files(folder)
    except OSError:
        raise ModelLoadError("The model's tokenizer files cannot be read.") from None


def load_parts(config: ReplicaConfig) -> ReplicaParts:
    """Load the model and build its engine. Raises ModelLoadError, OutOfBlocks or LaunchError."""
    import torch

    from worker.engine.core import EngineCore
    from worker.engine.thread import ThreadEngine
    from worker.models.load import load_model, plan_blocks

    torch.set_num_threads(thread_count(config.threads))
    model = load_model(config)
    blocks = plan_blocks(config, model.spec)
    clock = SystemClock()
    limits = EngineConfig(
        blocks=blocks,
        step_tokens_max=config.step_tokens_max,
        running_max=config.running_max,
        waiting_max=config.waiting_max,
        cache=config.cache,
    )
    engine = ThreadEngine(EngineCore(model, limits, clock))
    return ReplicaParts(engine, model.spec, blocks, _text_files(config.model), clock)


def build_replica(config: ReplicaConfig, on_failure: Callable[[], None] | None = None) -> Replica:
    """A replica ready to `start`. `on_failure` is called if its server or engine fails later on."""
    secret = read_secret(Path(config.secret_file))
    return Replica(config, load_parts(config), secret, on_failure)
