"""`banyan episodes`: a conversation's episodes, built once and written to the tiers that replicas
read. It knows no router and starts no cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from banyan.conversation import Conversation, read_conversation
from seams.errors import InvalidRequest, LaunchError
from seams.proof import read_secret
from seams.textfiles import read_text_files

if TYPE_CHECKING:
    from kvstore.keys import BlockKey
    from kvstore.tiered import TieredStore
    from worker.config import ReplicaConfig
    from worker.episodes.base import EpisodeOptions
    from worker.episodes.build import EpisodeBuilder
    from worker.episodes.outline import Outline
    from worker.models.base import Model, ModelSpec

GIB = 1 << 30
HOST_OBJECTS = 3  # of the largest: one may take half of host memory, and half of it may be unsunk
HOST_BYTES_MIN = 1 << 26
DISK_SHARE = 0.9  # of nvme_gib that episodes may take
FLUSH_S, FLUSHES_MAX = 5.0, 120
REDIS_TTL_S = 7 * 24 * 3600  # longer than other blocks: nobody computes them again by the way
REDIS_TTL_S_MAX = 10 * 365 * 24 * 3600
LOADING, BUILDING = "load the model", "build and write episodes"

Report = Callable[[str, float], None]
"""Called with a stage (LOADING, BUILDING) and its share done, 0 to 1."""


@dataclass(frozen=True)
class Asked:
    """What to build, for whom, and where it shall lie. `model` is a local folder or GGUF file;
    `policy` what requests will say, epicache:KEY=VALUE,..."""

    model: str
    conversation: Path
    policy: str
    secret_file: Path  # of the cluster: a tenant's names are its own
    tenant: str
    namespace: str  # of the cluster in the shared tier
    replica: str = "replica-0"  # whose disk tier
    nvme: str = ""
    nvme_gib: float = 0.0
    redis: str = ""
    redis_ttl_s: int = REDIS_TTL_S  # until they vanish there
    device: str = "auto"
    dtype: str = "auto"
    kv_codec: str = "model"
    cold_codec: str = "none"


@dataclass(frozen=True)
class Built:
    """What was written: the conversation's tokens, segments of each episode, tokens that each keeps
    per layer and KV head, the most that were stored while it was built, bytes of one episode."""

    policy: str
    history_tokens: int
    segments: tuple[int, ...]
    kept_tokens: int
    peak_tokens: int
    episode_bytes: int


def build(asked: Asked, report: Report) -> Built:
    """Build every episode and write it to the tier that was asked for. Raises BanyanError with
    one sentence; what was written until then stays, and nobody finds it without its index."""
    from worker.episodes.build import EpisodeBuilder
    from worker.episodes.outline import outline, patch_room
    from worker.models.load import load_model

    config = _config(asked)
    options = _options(asked.policy, config.block_tokens)
    said = _conversation(asked, config.block_tokens)
    if len(said.token_ids) <= options.budget_tokens:
        raise InvalidRequest(
            f"The conversation has {len(said.token_ids)} tokens: a budget of "
            f"{options.budget_tokens} keeps them all, as the prefix cache does without episodes."
        )
    patch_room(said.instruction, options)
    secret = read_secret(asked.secret_file)
    report(LOADING, 0.0)
    model = load_model(config, lambda done, total: report(LOADING, done / max(1, total)))
    report(LOADING, 1.0)
    builder = EpisodeBuilder(model, said.token_ids, options)  # refuses what is too long
    found = outline(said.token_ids, said.ends, said.instruction, options)  # of that it takes long
    store = _open(config, model.spec, builder.episode_bytes, len(found.patches))
    try:
        last = _last_key(model.spec, said, secret, asked.tenant)
        _write(store, model, last, options, found, builder, report)
    finally:
        store.close()
    return Built(
        policy=asked.policy,
        history_tokens=len(said.token_ids),
        segments=tuple(found.index.segments.tolist()),
        kept_tokens=builder.stored,
        peak_tokens=builder.peak_tokens,
        episode_bytes=builder.episode_bytes,
    )


def _config(asked: Asked) -> ReplicaConfig:
    """Of a replica that reads what we write: computed by torch, which can be watched."""
    from kernels.codecs.names import OSCAR, parse_codec
    from worker.service.settings import parse_config

    codec = parse_codec(asked.kv_codec)
    if codec is not None and codec.kind == OSCAR:
        raise InvalidRequest(
            f"The KV codec {asked.kv_codec} keeps the newest tokens in a window, and an episode "
            "keeps tokens of the whole conversation: one of the two, not both."
        )
    if asked.redis_ttl_s > REDIS_TTL_S_MAX:
        raise InvalidRequest("Episodes stay in a shared tier for ten years at most.")
    if bool(asked.nvme) == bool(asked.redis):
        raise LaunchError("Episodes are written to one tier at a time: --nvme or --redis.")
    return parse_config(
        {
            "replica": asked.replica, "model": asked.model, "served_name": "episodes",
            "routers": (), "secret_file": str(asked.secret_file), "compute": "torch",
            "device": asked.device, "dtype": asked.dtype, "nvme": asked.nvme,
            "nvme_gib": asked.nvme_gib, "redis": asked.redis, "redis_ttl_s": asked.redis_ttl_s,
            "namespace": asked.namespace, "kv_codec": asked.kv_codec,
            "cold_codec": asked.cold_codec,
        }
    )  # fmt: skip


def _options(policy: str, block_tokens: int) -> EpisodeOptions:
    from worker.engine.retention.options import EPICACHE, Options
    from worker.episodes.base import EpisodeOptions

    given = Options(policy)
    if given.name != EPICACHE:
        raise InvalidRequest(f"The policy of episodes is {EPICACHE}:KEY=VALUE,...")
    return EpisodeOptions.of(given, block_tokens)


def _conversation(asked: Asked, block_tokens: int) -> Conversation:
    from router.text.model import TextModel

    folder = Path(asked.model).parent if Path(asked.model).is_file() else Path(asked.model)
    try:
        files = read_text_files(folder)
    except OSError:
        raise LaunchError("The model's tokenizer files cannot be read.") from None
    return read_conversation(asked.conversation, TextModel(files), block_tokens)


def _last_key(spec: ModelSpec, said: Conversation, secret: bytes, tenant: str) -> BlockKey:
    from kvstore.keys import ChainSpec, chain, root, tenant_salt

    top = root(spec.fingerprint, "", spec.block_tokens)
    whole = ChainSpec(top, spec.block_tokens, tenant_salt(secret, tenant))
    return chain(whole, said.token_ids)[-1]


def _open(config: ReplicaConfig, spec: ModelSpec, episode_bytes: int, episodes: int) -> TieredStore:
    """The tier that was asked for, with room, below host memory. Raises LaunchError."""
    from kvstore.fetch import Level
    from worker.service.tiers import open_tiers

    if config.nvme and episodes * episode_bytes > DISK_SHARE * config.nvme_gib * GIB:
        raise LaunchError(
            f"{episodes} episodes take {episodes * episode_bytes / GIB:.2f} GiB and --nvme-gib "
            f"allows {config.nvme_gib:.2f} GiB, of which they may take {DISK_SHARE:.0%}."
        )
    host_gib = (HOST_OBJECTS * episode_bytes + HOST_BYTES_MIN) / GIB
    store = open_tiers(replace(config, host_gib=host_gib), spec)
    assert store is not None
    level = Level.DISK if config.nvme else Level.SHARED
    if level not in store.lower:
        store.close()
        raise LaunchError(
            "The disk tier is not to be had. It must not be in use: stop the replica, or name "
            "another with --replica."
        )
    return store


def _write(
    store: TieredStore,
    model: Model,
    last: BlockKey,
    options: EpisodeOptions,
    found: Outline,
    builder: EpisodeBuilder,
    report: Report,
) -> None:
    """The index last: what it names is there by then."""
    from kvstore.objects import Objects
    from worker.episodes.keeping import EpisodeShelf

    shelf = EpisodeShelf(
        Objects(store, model.spec.groups, model.spec.block_tokens), model, last, options
    )
    for episode, patch in enumerate(found.patches):
        report(BUILDING, episode / len(found.patches))
        builder.build(patch)
        _sink(store, shelf.put_episode(episode, builder.state, builder.pages))
    _sink(store, shelf.put_index(found.index))
    report(BUILDING, 1.0)


def _sink(store: TieredStore, there: bool) -> None:
    """Wait until the lower tier has what was put. Raises LaunchError if it does not take it."""
    if not there:
        raise LaunchError("There is not enough host memory to write an episode from.")
    (queue,) = store.lower.values()
    for _ in range(FLUSHES_MAX):
        if store.flush(FLUSH_S):
            return
        state = queue.tier.stats().state
        if state != "ok":
            raise LaunchError(f"The {queue.tier.name} tier takes nothing now: it is {state}.")
    raise LaunchError(f"The {queue.tier.name} tier did not take an episode in time.")
