"""TextModel: everything a served model needs to turn text into token ids and back.

Built from the files a replica sent; knows no replica, and loads neither torch nor transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from router.text.detokenize import (
    BYTE_TOKEN,
    ByteDetokenizer,
    ByteVocabulary,
    Detokenizer,
    WindowDetokenizer,
)
from router.text.template import ChatTemplate, special_tokens, template_source
from seams.errors import Incompatible, InvalidRequest
from seams.textfiles import TEMPLATE_FILE, template_fingerprint, tokenizer_fingerprint

SPACE = "\u2581"  # as SentencePiece writes it
CONTEXT_TOKENS = 8  # of the prompt, so that a continued text keeps its leading space


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError:
        raise Incompatible(f"The model's {name} is not JSON.") from None
    if not isinstance(value, dict):
        raise Incompatible(f"The model's {name} is not a JSON object.")
    return value


def _is_byte_level(tokenizer_json: Mapping[str, Any]) -> bool:
    decoder = tokenizer_json.get("decoder") or {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    return [step.get("type") for step in steps] == ["ByteLevel"]


class TextModel:
    """Tokenizer and template of one model. Immutable and safe to share between streams."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """Raises Incompatible if a file is missing or cannot be read."""
        if "tokenizer.json" not in files:
            raise Incompatible("The model has no tokenizer.json.")
        try:
            self._tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
        except Exception:  # the library raises bare Exceptions
            raise Incompatible("The model's tokenizer.json cannot be read.") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.files = dict(files)
        self.tokenizer_fingerprint = tokenizer_fingerprint(files)
        self.template_fingerprint = template_fingerprint(files)
        config = _json_object(files, "tokenizer_config.json")
        named = special_tokens(config, _json_object(files, "special_tokens_map.json"))
        self._special_ids = frozenset(
            i for i, t in self._tokenizer.get_added_tokens_decoder().items() if t.special
        )
        self._edges = self._configured_edges(config, named)
        byte_level = _is_byte_level(_json_object(files, "tokenizer.json"))
        self._bytes = ByteVocabulary(self._tokenizer, self._special_ids) if byte_level else None
        source = template_source(files.get(TEMPLATE_FILE), config)
        self._template = None if source is None else ChatTemplate(source, named)

    @classmethod
    def verified(
        cls, files: Mapping[str, bytes], tokenizer_print: str, template_print: str
    ) -> TextModel:
        """From files that came over the wire. Raises Incompatible if others than the named."""
        given = (tokenizer_fingerprint(files), template_fingerprint(files))
        if given != (tokenizer_print, template_print):
            raise Incompatible("The text files differ from the fingerprints in the hello.")
        return cls(files)

    def _configured_edges(
        self, config: Mapping[str, Any], named: Mapping[str, str]
    ) -> tuple[list[int], list[int]] | None:
        """Ids put before and after a text where tokenizer_config says so; None = tokenizer.json's
        own post-processor decides."""
        wanted = [config.get("add_bos_token"), config.get("add_eos_token")]
        if all(want is None for want in wanted):
            return None
        names = ("bos_token", "eos_token")
        ids = [self._tokenizer.token_to_id(named.get(name, "")) for name in names]
        before, after = (
            [i] if want and i is not None else [] for want, i in zip(wanted, ids, strict=True)
        )
        return before, after

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens this tokenizer puts around one."""
        if self._edges is None:
            return self._encode(text, True)
        before, after = self._edges
        return [*before, *self._encode(text, False), *after]

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of (role, content) messages. Raises InvalidRequest (no template, refused)."""
        if self._template is None:
            raise InvalidRequest("This model has no chat template; send text or token ids.")
        return self._encode(self._template.render(messages), False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # the batch call computes no offsets and releases the interpreter lock
        encoded = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded[0].ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text at once, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; of a special one its name. May be a part of a character."""
        token = self._tokenizer.id_to_token(token_id) or ""
        if self._bytes is not None and token_id not in self._special_ids:
            return self._bytes[token_id]
        if BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(token[3:5])
        return token.replace(SPACE, " ").encode()

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A new detokenizer. `context`: prompt ids that the text continues, none for a chat."""
        if self._bytes is not None:
            return ByteDetokenizer(self._bytes)
        return WindowDetokenizer(self._tokenizer, self._special_ids, context[-CONTEXT_TOKENS:])
