from banyan.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "tokens", "sampling", "stop", "no_cache", "priority", "session", "resume", "label")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    NO_CACHE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    tokens: TokenIds
    sampling: _common_pb2.Sampling
    stop: _containers.RepeatedScalarFieldContainer[str]
    no_cache: bool
    priority: int
    session: str
    resume: Resume
    label: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., no_cache: bool = ..., priority: _Optional[int] = ..., session: _Optional[str] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., label: _Optional[str] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("seed", "token_ids")
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, seed: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "choice_finished", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    delta: Delta
    choice_finished: ChoiceFinished
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., choice_finished: _Optional[_Union[ChoiceFinished, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "seed", "model", "replica", "prompt_tokens", "label")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    model: str
    replica: str
    prompt_tokens: int
    label: str
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., model: _Optional[str] = ..., replica: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., label: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("choice", "position", "token_ids", "text", "logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    def __init__(self, choice: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ...) -> None: ...

class ChoiceFinished(_message.Message):
    __slots__ = ("choice", "reason", "text", "stop")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    choice: int
    reason: _common_pb2.FinishReason
    text: str
    stop: str
    def __init__(self, choice: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., text: _Optional[str] = ..., stop: _Optional[str] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("usage", "decision")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    usage: _common_pb2.Usage
    decision: _common_pb2.Decision
    def __init__(self, usage: _Optional[_Union[_common_pb2.Usage, _Mapping]] = ..., decision: _Optional[_Union[_common_pb2.Decision, _Mapping]] = ...) -> None: ...

class PickRequest(_message.Message):
    __slots__ = ("request", "ticket_ttl_ms")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TICKET_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    ticket_ttl_ms: int
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., ticket_ttl_ms: _Optional[int] = ...) -> None: ...

class PickResponse(_message.Message):
    __slots__ = ("replica", "address", "ticket", "request_id", "seed", "model", "root_id", "token_ids", "decision")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ROOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    replica: str
    address: str
    ticket: bytes
    request_id: str
    seed: int
    model: str
    root_id: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    decision: _common_pb2.Decision
    def __init__(self, replica: _Optional[str] = ..., address: _Optional[str] = ..., ticket: _Optional[bytes] = ..., request_id: _Optional[str] = ..., seed: _Optional[int] = ..., model: _Optional[str] = ..., root_id: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., decision: _Optional[_Union[_common_pb2.Decision, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelInfo]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelInfo, _Mapping]]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "context_tokens", "replicas", "tokenizer_fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    context_tokens: int
    replicas: int
    tokenizer_fingerprint: str
    def __init__(self, name: _Optional[str] = ..., context_tokens: _Optional[int] = ..., replicas: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ...) -> None: ...

class ClusterStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClusterStateResponse(_message.Message):
    __slots__ = ("router", "uptime_s", "replicas", "index_blocks", "streams_open")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    INDEX_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STREAMS_OPEN_FIELD_NUMBER: _ClassVar[int]
    router: str
    uptime_s: float
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaState]
    index_blocks: int
    streams_open: int
    def __init__(self, router: _Optional[str] = ..., uptime_s: _Optional[float] = ..., replicas: _Optional[_Iterable[_Union[ReplicaState, _Mapping]]] = ..., index_blocks: _Optional[int] = ..., streams_open: _Optional[int] = ...) -> None: ...

class ReplicaState(_message.Message):
    __slots__ = ("replica", "epoch", "state", "address", "models", "running", "waiting", "blocks_total", "blocks_free", "blocks_cached", "blocks_indexed", "hit_share", "heartbeat_age_s", "prompt_tokens", "cached_tokens", "steps", "numeric_class", "representation", "tiers", "kv_token_bytes")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_INDEXED_FIELD_NUMBER: _ClassVar[int]
    HIT_SHARE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NUMERIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    REPRESENTATION_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    replica: str
    epoch: int
    state: str
    address: str
    models: _containers.RepeatedScalarFieldContainer[str]
    running: int
    waiting: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_indexed: int
    hit_share: float
    heartbeat_age_s: float
    prompt_tokens: int
    cached_tokens: int
    steps: int
    numeric_class: str
    representation: str
    tiers: _containers.RepeatedCompositeFieldContainer[_common_pb2.TierLoad]
    kv_token_bytes: float
    def __init__(self, replica: _Optional[str] = ..., epoch: _Optional[int] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_indexed: _Optional[int] = ..., hit_share: _Optional[float] = ..., heartbeat_age_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., numeric_class: _Optional[str] = ..., representation: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[_common_pb2.TierLoad, _Mapping]]] = ..., kv_token_bytes: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "request")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request: GenerateRequest
    def __init__(self, request_id: _Optional[str] = ..., request: _Optional[_Union[GenerateRequest, _Mapping]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: _common_pb2.Decision
    def __init__(self, decision: _Optional[_Union[_common_pb2.Decision, _Mapping]] = ...) -> None: ...

class ResetCacheRequest(_message.Message):
    __slots__ = ("tiers",)
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tiers: bool
    def __init__(self, tiers: bool = ...) -> None: ...

class ResetCacheResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaReset]
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaReset, _Mapping]]] = ...) -> None: ...

class ReplicaReset(_message.Message):
    __slots__ = ("replica", "blocks", "blocks_in_use", "tier_blocks")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_USE_FIELD_NUMBER: _ClassVar[int]
    TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    blocks: int
    blocks_in_use: int
    tier_blocks: int
    def __init__(self, replica: _Optional[str] = ..., blocks: _Optional[int] = ..., blocks_in_use: _Optional[int] = ..., tier_blocks: _Optional[int] = ...) -> None: ...

class TextFilesRequest(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    def __init__(self, fingerprint: _Optional[str] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("name", "data", "last")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    last: bool
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ..., last: bool = ...) -> None: ...
