"""Turns token ids into text one by one, never splitting a character. Knows no stop strings.

What a detokenizer holds back depends only on the ids pushed so far, never on how they were grouped,
so a stream that resumes elsewhere replays its ids and goes on with the same text. The
concatenation of everything returned equals the tokenizer's decoding of all ids at once.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
HELD_TOKENS_MAX = 16  # an unknown decoder's incomplete text is given out after this many tokens
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Detokenizer(Protocol):
    """One choice's text. Both calls mutate it."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often empty or a few characters."""
        ...

    def flush(self) -> str:
        """What was still held back, incomplete as it is; nothing may be pushed afterwards."""
        ...


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte, inverted (Radford et al. 2019, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_BYTES = _byte_of_char()


class ByteVocabulary:
    """The bytes of every token of a byte-level tokenizer, looked up once per id."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._bytes: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        try:
            return bytes(_BYTES[char] for char in token)
        except KeyError:  # an added token, written as it is
            return token.encode()


class ByteDetokenizer:
    """For byte-level BPE: tokens are bytes, held back is at most an incomplete UTF-8 character."""

    def __init__(self, vocabulary: ByteVocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._vocabulary[token_id])

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window before and after each token.

    `_ids` holds the tokens of the last text given out and those held back since; a token's text is
    what it adds to the window's. A run of byte tokens is held until it ends, because whether its
    first bytes form characters depends on its last.
    """

    def __init__(
        self, tokenizer: Tokenizer, special_ids: frozenset[int], context: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids
        self._ids = [i for i in context if i not in special_ids]
        self._read = len(self._ids)
        self._given = self._decode(self._ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return ""
        self._ids.append(token_id)
        if BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._ids)
        held = len(self._ids) - self._read
        if text.endswith(REPLACEMENT) and held < HELD_TOKENS_MAX:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        if len(text) <= len(self._given):
            return ""
        new = text[len(self._given) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._given = self._decode(self._ids)
        return new

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._given) :]
