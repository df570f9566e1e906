"""The model that a compression report is about: its weights once, and models of it in any codec.

It knows what a replica would be told, and makes its models as a replica does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kernels.codecs.choose import make_codec
from kernels.codecs.names import OSCAR, parse_codec
from kernels.codecs.oscar import LayerRotations
from kernels.hybrid import Reach
from kvstore.groups import KVGroup
from seams.errors import InvalidRequest, ModelLoadError
from worker.calibration.capture import TOKENS_MAX, TOKENS_MIN, capture
from worker.calibration.statistics import Statistics
from worker.compression.arithmetic import Shape
from worker.compression.base import PLAIN
from worker.compression.texts import Text
from worker.config import ReplicaConfig
from worker.models.base import Model
from worker.models.config import ModelConfig
from worker.models.fingerprint import model_fingerprint
from worker.models.llama import LlamaModel, coded_layouts, hybrid_layouts, page_layouts
from worker.models.load import load_model
from worker.models.making import make_model
from worker.models.opening import open_model
from worker.models.weights import Weights, checkpoint_dtype, load_weights

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Subject:
    """On a CPU. `weights` are float32 and shared by all models of `model`."""

    told: ReplicaConfig
    config: ModelConfig
    weights: Weights
    fingerprint: str
    stored: torch.dtype  # of the checkpoint: what a replica keeps keys and values in
    tokenizer: Tokenizer
    statistics: Statistics | None = None  # None: it cannot be calibrated

    @property
    def shape(self) -> Shape:
        """In the stored dtype."""
        config, size = self.config, self.told.block_tokens
        number = self.stored.itemsize
        return Shape(config.windows, config.kv_heads, config.head_dim, number, size)

    @property
    def prunable(self) -> bool:
        """Whether tokens can be dropped: windows drop them already."""
        return not any(self.config.windows)

    def groups(self, codec: str) -> tuple[KVGroup, ...]:
        """Of a model in the stored dtype: what its blocks take."""
        name, size = parse_codec(codec), self.told.block_tokens
        assert name is not None, codec
        config, dtype = self.config, self.stored
        bases = self._bases if name.kind == OSCAR else None
        made = make_codec(name, config.layers, config.head_dim, dtype, rotations=bases)
        if made is None:
            return tuple(group for group, _ in page_layouts(config, size, dtype))
        if name.kind == OSCAR:
            reach = Reach(name.sink_tokens, name.window_tokens)
            mixed = hybrid_layouts(config, size, dtype, made, reach)
            return tuple(group for group, _ in mixed)
        return tuple(group for group, _ in coded_layouts(config, size, dtype, made))

    @property
    def _bases(self) -> list[LayerRotations]:
        assert self.statistics is not None, "OSCAR is calibrated"
        known = self.statistics
        pairs = zip(known.key_rotation, known.value_rotation, strict=True)
        return [LayerRotations(keys, values) for keys, values in pairs]

    def model(self, codec: str) -> LlamaModel:
        """In float32 by torch, so that the codec is all that rounds; without pools."""
        told = replace(self.told, kv_codec=codec, compute="torch", dtype="fp32")
        made = make_model(
            told,
            self.config,
            self.weights,
            fingerprint=self.fingerprint,
            context_tokens=self.config.context_tokens,
            compiled=False,
        )
        assert isinstance(made, LlamaModel)
        return made

    def served(self, codec: str, compute: str = "auto", dtype: str = "auto") -> Model:
        """As a replica that is told this codec would compute; its weights are its own."""
        return load_model(replace(self.told, kv_codec=codec, compute=compute, dtype=dtype))


def check_codecs(codecs: tuple[str, ...]) -> None:
    """Raises InvalidRequest for what is no codec's name, or none but the model's dtype."""
    for codec in codecs:
        if codec == PLAIN or parse_codec(codec) is None:
            raise InvalidRequest(f"There is no KV codec {codec}.")
    if len(set(codecs)) < len(codecs):
        raise InvalidRequest("Each codec is named once.")


def open_subject(model: str) -> Subject:
    """The model in a folder or GGUF file, not calibrated. Raises ModelLoadError."""
    path = Path(model)
    config, source = open_model(path)
    folder = path.parent if path.is_file() else path
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the library raises bare Exceptions
        raise ModelLoadError("The model has no tokenizer.json that can be read.") from None
    tokenizer.no_truncation()
    with source:
        stored = checkpoint_dtype(source)
        fingerprint = model_fingerprint(source, config)
        weights = load_weights(source, config, torch.float32, CPU)
    told = ReplicaConfig(
        replica="report", model=model, served_name="report", routers=(), secret_file="",
        device="cpu",
    )  # fmt: skip
    return Subject(told, config, weights, fingerprint, stored, tokenizer)


def with_calibration(subject: Subject, file: Path) -> Subject:
    """The same with a file of `banyan calibrate`. Raises LaunchError."""
    known = Statistics.load(file, subject.fingerprint)
    return replace(subject, told=replace(subject.told, calibration=str(file)), statistics=known)


def calibrated(subject: Subject, text: Text, tokens: int, file: Path) -> Subject:
    """The same with what is learnt of it from the text; writes the file. The subject itself if it
    cannot be calibrated. Raises InvalidRequest if the text is too short, OutOfBlocks."""
    if not subject.prunable:
        return subject
    ids = subject.tokenizer.encode(text.text).ids
    ids = ids[: min(tokens, TOKENS_MAX, subject.config.context_tokens)]
    if len(ids) < TOKENS_MIN:
        raise InvalidRequest(f"A calibration needs {TOKENS_MIN} tokens of text; here {len(ids)}.")
    capture(subject.model(PLAIN), subject.config, ids).save(file)
    return with_calibration(subject, file)


def usable(subject: Subject, codecs: tuple[str, ...]) -> tuple[str, ...]:
    """Those that the model can be put into: OSCAR needs a calibration."""
    return tuple(c for c in codecs if not c.startswith(OSCAR) or subject.statistics is not None)
