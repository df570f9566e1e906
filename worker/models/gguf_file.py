"""GgufFile: the container, as a file maps it: metadata and where tensors lie; knows no model.

Source: the GGUF specification (versions 2 and 3, little endian). Nothing in a file is believed:
every length is checked against what is left of it before anything is read or made.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seams.errors import ModelLoadError
from worker.models.gguf_blocks import TYPES, BlockType, dequantise

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ENTRIES_MAX = 1 << 16  # of metadata, and of tensors
NAME_LENGTH_MAX = 256
DIMENSIONS_MAX = 4
VALUES_MAX = 1 << 40  # of one tensor; the file's length is the real bound
ALIGNMENT_DEFAULT = 32
ALIGNMENT_MAX = 1 << 20

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
SCALARS |= {12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9


@dataclass(frozen=True)
class StringArray:
    """A list of strings that nobody has decoded yet."""

    offset: int
    count: int


Value = int | float | bool | str | list[int] | list[float] | StringArray


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies. `shape` is [out, in]: the file has it the other way round."""

    shape: tuple[int, ...]
    kind: BlockType
    offset: int  # from the file's start
    bytes: int


class _Truncated(Exception):
    """The file ends before what it promises."""


class GgufFile:
    """An open (mapped) file; raises ModelLoadError, one sentence, for anything wrong with it.

    Tensors are read through the mapping; they stay valid after the file is dropped.
    """

    def __init__(self, path: Path) -> None:
        """Reads the metadata and the list of tensors, no tensor."""
        self.path = path
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._at = 0
        try:
            self._data: NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, "r"))
        except (OSError, ValueError):  # ValueError: an empty file
            raise ModelLoadError(f"{path.name} is not a readable GGUF file.") from None
        self._view = self._data.data
        try:
            self._read()
        except _Truncated:
            raise ModelLoadError(f"The GGUF file {path.name} is damaged or incomplete.") from None

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor, a view of the mapping."""
        tensor = self.tensors[name]
        return self._data[tensor.offset : tensor.offset + tensor.bytes]

    def dense(self, name: str) -> NDArray[np.float32]:
        """A tensor's values, float32, in its shape; ModelLoadError if one is not finite."""
        tensor = self.tensors[name]
        try:
            return dequantise(self.raw(name), tensor.kind).reshape(tensor.shape)
        except ValueError:
            message = f"The GGUF tensor {name[:64]} holds numbers that are not finite."
            raise ModelLoadError(message) from None

    def strings(self, key: str) -> list[str]:
        """A metadata list of strings, decoded; empty if there is none of this name."""
        listed = self.metadata.get(key)
        if not isinstance(listed, StringArray):
            return []
        self._at = listed.offset
        return [self._string() for _ in range(listed.count)]

    # --- reading -----------------------------------------------------------------------------

    def _read(self) -> None:
        if bytes(self._take(4)) != MAGIC:
            raise ModelLoadError(f"{self.path.name} is not a GGUF file.")
        version = self._number("I")
        if version not in VERSIONS:
            raise ModelLoadError(
                f"GGUF version {version} of {self.path.name} is not supported (2, 3)."
            )
        tensors, entries = self._number("Q"), self._number("Q")
        if max(tensors, entries) > ENTRIES_MAX:
            raise _Truncated
        for _ in range(entries):
            key = self._name()
            self.metadata[key] = self._value(self._number("I"))
        listed = [self._tensor_entry() for _ in range(tensors)]
        self._place(listed)

    def _take(self, count: int) -> memoryview:
        if count > len(self._view) - self._at:
            raise _Truncated
        taken = self._view[self._at : self._at + count]
        self._at += count
        return taken

    def _number(self, code: str) -> int:
        (value,) = struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))
        assert isinstance(value, int)
        return value

    def _string(self) -> str:
        return bytes(self._take(self._number("Q"))).decode(errors="replace")

    def _name(self) -> str:
        """Of an entry or a tensor: short and printable, so that an error may repeat it."""
        name = self._string()
        if len(name) > NAME_LENGTH_MAX or not (name.isascii() and name.isprintable()):
            raise _Truncated
        return name

    def _value(self, code: int) -> Value:
        if code == STRING:
            return self._string()
        if code == ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        return self._scalars(code, 1)[0]

    def _array(self, code: int, count: int) -> Value:
        if code == STRING:
            listed = StringArray(self._at, count)
            for _ in range(count):
                self._take(self._number("Q"))
            return listed
        return self._scalars(code, count)

    def _scalars(self, code: int, count: int) -> list[int] | list[float]:
        if code not in SCALARS:
            raise _Truncated
        form = SCALARS[code]
        data = self._take(count * struct.calcsize("<" + form))
        if code == FLOAT32:  # 1e-05, not 9.999999747378752e-06: what the model's author wrote
            return [float(str(value)) for value in np.frombuffer(data, dtype="<f4")]
        return list(struct.unpack(f"<{count}{form}", data))

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name()
        dimensions = self._number("I")
        if not 0 < dimensions <= DIMENSIONS_MAX:
            raise _Truncated
        shape = tuple(self._number("Q") for _ in range(dimensions))
        return name, shape[::-1], self._number("I"), self._number("Q")

    def _place(self, listed: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        """Tensors' data starts at the next multiple of the alignment."""
        alignment = self.metadata.get("general.alignment", ALIGNMENT_DEFAULT)
        if type(alignment) is not int or not 0 < alignment <= ALIGNMENT_MAX:
            raise _Truncated
        start = -(-self._at // alignment) * alignment
        for name, shape, code, offset in listed:
            kind = TYPES.get(code)
            if kind is None:
                known = ", ".join(k.name for k in TYPES.values())
                raise ModelLoadError(
                    f"GGUF tensors of type number {code} are not supported ({known})."
                )
            values = 1
            for dimension in shape:  # Python's integers: nothing overflows
                values *= dimension
            whole = 0 < values <= VALUES_MAX and shape[-1] % kind.block_values == 0
            size = values // kind.block_values * kind.block_bytes
            first = start + offset
            if not whole or offset % alignment or first + size > len(self._data):
                raise _Truncated
            if name in self.tensors:
                raise _Truncated
            self.tensors[name] = GgufTensor(shape, kind, first, size)
