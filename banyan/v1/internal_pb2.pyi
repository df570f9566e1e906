from banyan.v1 import api_pb2 as _api_pb2
from banyan.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]
    TIER_SHARED: _ClassVar[Tier]
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_DISK: Tier
TIER_SHARED: Tier

class AttachUp(_message.Message):
    __slots__ = ("greeting", "proof", "hello", "heartbeat")
    GREETING_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    greeting: Greeting
    proof: Proof
    hello: Hello
    heartbeat: Heartbeat
    def __init__(self, greeting: _Optional[_Union[Greeting, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class AttachDown(_message.Message):
    __slots__ = ("challenge", "welcome", "refusal")
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    challenge: Challenge
    welcome: Welcome
    refusal: _common_pb2.Status
    def __init__(self, challenge: _Optional[_Union[Challenge, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[_common_pb2.Status, _Mapping]] = ...) -> None: ...

class Greeting(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    def __init__(self, nonce: _Optional[bytes] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce", "proof")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "replica", "epoch", "address", "host", "node", "cache_domain", "models", "block_tokens", "kv_groups", "representation", "numeric_class", "capacities", "priors", "probe")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    CACHE_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_GROUPS_FIELD_NUMBER: _ClassVar[int]
    REPRESENTATION_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    CAPACITIES_FIELD_NUMBER: _ClassVar[int]
    PRIORS_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    replica: str
    epoch: int
    address: str
    host: str
    node: str
    cache_domain: str
    models: _containers.RepeatedCompositeFieldContainer[ServedModel]
    block_tokens: int
    kv_groups: _containers.RepeatedCompositeFieldContainer[KVGroupInfo]
    representation: str
    numeric_class: str
    capacities: _containers.RepeatedCompositeFieldContainer[TierCapacity]
    priors: Priors
    probe: ProbeChain
    def __init__(self, protocol: _Optional[int] = ..., replica: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., node: _Optional[str] = ..., cache_domain: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ..., block_tokens: _Optional[int] = ..., kv_groups: _Optional[_Iterable[_Union[KVGroupInfo, _Mapping]]] = ..., representation: _Optional[str] = ..., numeric_class: _Optional[str] = ..., capacities: _Optional[_Iterable[_Union[TierCapacity, _Mapping]]] = ..., priors: _Optional[_Union[Priors, _Mapping]] = ..., probe: _Optional[_Union[ProbeChain, _Mapping]] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("root_id", "name", "adapter", "context_tokens", "model_fingerprint", "tokenizer_fingerprint", "template_fingerprint", "vocab_tokens", "eos_token_ids", "adapter_fingerprint")
    ROOT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    root_id: bytes
    name: str
    adapter: str
    context_tokens: int
    model_fingerprint: str
    tokenizer_fingerprint: str
    template_fingerprint: str
    vocab_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter_fingerprint: str
    def __init__(self, root_id: _Optional[bytes] = ..., name: _Optional[str] = ..., adapter: _Optional[str] = ..., context_tokens: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., template_fingerprint: _Optional[str] = ..., vocab_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., adapter_fingerprint: _Optional[str] = ...) -> None: ...

class KVGroupInfo(_message.Message):
    __slots__ = ("id", "kind", "layers", "block_bytes", "window_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: str
    layers: int
    block_bytes: int
    window_tokens: int
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[str] = ..., layers: _Optional[int] = ..., block_bytes: _Optional[int] = ..., window_tokens: _Optional[int] = ...) -> None: ...

class TierCapacity(_message.Message):
    __slots__ = ("tier", "blocks", "bytes_per_s")
    TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    blocks: int
    bytes_per_s: float
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., blocks: _Optional[int] = ..., bytes_per_s: _Optional[float] = ...) -> None: ...

class Priors(_message.Message):
    __slots__ = ("prefill_s_per_token", "step_s", "step_s_per_sequence")
    PREFILL_S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    prefill_s_per_token: float
    step_s: float
    step_s_per_sequence: float
    def __init__(self, prefill_s_per_token: _Optional[float] = ..., step_s: _Optional[float] = ..., step_s_per_sequence: _Optional[float] = ...) -> None: ...

class ProbeChain(_message.Message):
    __slots__ = ("root_id", "token_ids", "salt", "private_from", "keys")
    ROOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FROM_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    root_id: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    salt: bytes
    private_from: int
    keys: bytes
    def __init__(self, root_id: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., salt: _Optional[bytes] = ..., private_from: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("router", "heartbeat_ms", "lease_ms")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    router: str
    heartbeat_ms: int
    lease_ms: int
    def __init__(self, router: _Optional[str] = ..., heartbeat_ms: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("load", "draining")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    load: Load
    draining: bool
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., draining: bool = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "blocks_total", "blocks_free", "blocks_cached", "queued_prefill_tokens", "steps", "step_s", "prefill_s_per_token", "prompt_tokens", "cached_tokens", "stalled", "tiers", "blocks_low", "retention_rounds", "retention_dropped_tokens", "retention_freed_blocks", "retention_moved_bytes", "retention_objects_kept", "retention_objects_resumed", "retention_resumed_tokens", "kv_token_bytes")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_LOW_FIELD_NUMBER: _ClassVar[int]
    RETENTION_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETENTION_OBJECTS_KEPT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_OBJECTS_RESUMED_FIELD_NUMBER: _ClassVar[int]
    RETENTION_RESUMED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    queued_prefill_tokens: int
    steps: int
    step_s: float
    prefill_s_per_token: float
    prompt_tokens: int
    cached_tokens: int
    stalled: bool
    tiers: _containers.RepeatedCompositeFieldContainer[_common_pb2.TierLoad]
    blocks_low: int
    retention_rounds: int
    retention_dropped_tokens: int
    retention_freed_blocks: int
    retention_moved_bytes: int
    retention_objects_kept: int
    retention_objects_resumed: int
    retention_resumed_tokens: int
    kv_token_bytes: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., step_s: _Optional[float] = ..., prefill_s_per_token: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., stalled: bool = ..., tiers: _Optional[_Iterable[_Union[_common_pb2.TierLoad, _Mapping]]] = ..., blocks_low: _Optional[int] = ..., retention_rounds: _Optional[int] = ..., retention_dropped_tokens: _Optional[int] = ..., retention_freed_blocks: _Optional[int] = ..., retention_moved_bytes: _Optional[int] = ..., retention_objects_kept: _Optional[int] = ..., retention_objects_resumed: _Optional[int] = ..., retention_resumed_tokens: _Optional[int] = ..., kv_token_bytes: _Optional[float] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("replica", "epoch", "seq", "snapshot", "snapshot_last", "ops", "digest")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_LAST_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    replica: str
    epoch: int
    seq: int
    snapshot: bool
    snapshot_last: bool
    ops: _containers.RepeatedCompositeFieldContainer[BlockOp]
    digest: bytes
    def __init__(self, replica: _Optional[str] = ..., epoch: _Optional[int] = ..., seq: _Optional[int] = ..., snapshot: bool = ..., snapshot_last: bool = ..., ops: _Optional[_Iterable[_Union[BlockOp, _Mapping]]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class BlockOp(_message.Message):
    __slots__ = ("kind", "tier", "group", "keys")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[BlockOp.Kind]
        KIND_STORED: _ClassVar[BlockOp.Kind]
        KIND_REMOVED: _ClassVar[BlockOp.Kind]
        KIND_MOVED: _ClassVar[BlockOp.Kind]
    KIND_UNSPECIFIED: BlockOp.Kind
    KIND_STORED: BlockOp.Kind
    KIND_REMOVED: BlockOp.Kind
    KIND_MOVED: BlockOp.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    kind: BlockOp.Kind
    tier: Tier
    group: int
    keys: bytes
    def __init__(self, kind: _Optional[_Union[BlockOp.Kind, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., group: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class EventControl(_message.Message):
    __slots__ = ("want_snapshot",)
    WANT_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    want_snapshot: bool
    def __init__(self, want_snapshot: bool = ...) -> None: ...

class ExecuteUp(_message.Message):
    __slots__ = ("submit", "cancel", "credit")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    cancel: Cancel
    credit: Credit
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "root_id", "token_ids", "prompt_tokens", "sampling", "priority", "tenant", "salt", "private_from", "deadline_ms", "credit_tokens", "kv_source", "no_cache")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FROM_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    NO_CACHE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    root_id: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    sampling: _common_pb2.Sampling
    priority: int
    tenant: str
    salt: bytes
    private_from: int
    deadline_ms: int
    credit_tokens: int
    kv_source: str
    no_cache: bool
    def __init__(self, request_id: _Optional[str] = ..., root_id: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., priority: _Optional[int] = ..., tenant: _Optional[str] = ..., salt: _Optional[bytes] = ..., private_from: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., credit_tokens: _Optional[int] = ..., kv_source: _Optional[str] = ..., no_cache: bool = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("request_id", "tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tokens: int
    def __init__(self, request_id: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("step", "emissions")
    STEP_FIELD_NUMBER: _ClassVar[int]
    EMISSIONS_FIELD_NUMBER: _ClassVar[int]
    step: int
    emissions: _containers.RepeatedCompositeFieldContainer[Emission]
    def __init__(self, step: _Optional[int] = ..., emissions: _Optional[_Iterable[_Union[Emission, _Mapping]]] = ...) -> None: ...

class Emission(_message.Message):
    __slots__ = ("request_id", "choice", "position", "token_ids", "logprobs", "finish", "error", "usage", "last")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    finish: _common_pb2.FinishReason
    error: _common_pb2.Status
    usage: _common_pb2.Usage
    last: bool
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., finish: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., error: _Optional[_Union[_common_pb2.Status, _Mapping]] = ..., usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., last: bool = ...) -> None: ...

class DirectRequest(_message.Message):
    __slots__ = ("ticket", "token_ids", "sampling", "no_cache")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NO_CACHE_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    no_cache: bool
    def __init__(self, ticket: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., no_cache: bool = ...) -> None: ...

class TicketBody(_message.Message):
    __slots__ = ("request_id", "replica", "epoch", "root_id", "token_digest", "seed", "tenant", "private_from", "expires_unix_ms", "prompt_tokens", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIVATE_FROM_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    replica: str
    epoch: int
    root_id: bytes
    token_digest: bytes
    seed: int
    tenant: str
    private_from: int
    expires_unix_ms: int
    prompt_tokens: int
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., replica: _Optional[str] = ..., epoch: _Optional[int] = ..., root_id: _Optional[bytes] = ..., token_digest: _Optional[bytes] = ..., seed: _Optional[int] = ..., tenant: _Optional[str] = ..., private_from: _Optional[int] = ..., expires_unix_ms: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...
