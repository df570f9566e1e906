"""Text models by fingerprint, fetched from the replicas that serve them and built off the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from banyan.v1 import api_pb2, internal_pb2, internal_pb2_grpc
from router.service.executors import SESSION_KEY, dial
from router.text.model import TextModel
from seams.clock import Clock
from seams.errors import Incompatible

FILES_BYTES_MAX = 256 * 1024 * 1024
FILE_NAMES_MAX = 16
FETCH_S_MAX = 8.0
KEPT_S = 60.0


TextKey = tuple[str, str]
"""What tells text models apart: (tokenizer, template) fingerprints."""


def text_key(served: internal_pb2.ServedModel) -> TextKey:
    """The key of a served model's text side; ("", ...) if it has none."""
    return served.tokenizer_fingerprint, served.template_fingerprint


class TextCache:
    """The text sides of the models served now or until lately."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._models: dict[TextKey, TextModel] = {}
        self._wanted_s: dict[TextKey, float] = {}
        self._building: dict[TextKey, asyncio.Lock] = {}

    def get(self, served: internal_pb2.ServedModel) -> TextModel | None:
        """None for a model without a tokenizer."""
        return self._models.get(text_key(served))

    def files(self, fingerprint: str) -> dict[str, bytes] | None:
        """The files of a tokenizer fingerprint, None if it is unknown."""
        for (tokenizer, _), model in self._models.items():
            if tokenizer == fingerprint:
                return model.files
        return None

    async def ensure(self, served: internal_pb2.ServedModel, address: str, token: str) -> None:
        """Have the text side of a model, from the replica at `address` if it is new.

        Raises Incompatible for files that do not fit, grpc.RpcError or TimeoutError if the replica
        does not deliver them.
        """
        key = text_key(served)
        if not key[0]:
            return
        try:
            async with self._building.setdefault(key, asyncio.Lock()):
                if key not in self._models:
                    async with asyncio.timeout(FETCH_S_MAX):
                        files = await _fetch(key[0], address, token)
                    self._models[key] = await asyncio.to_thread(TextModel.verified, files, *key)
                self._wanted_s[key] = self._clock.now()
        finally:
            self._building.pop(key, None)  # whoever waits has it, and finds the model made

    def retain(self, served: Iterable[internal_pb2.ServedModel]) -> None:
        """Drop what has not been among `served` for a while."""
        now_s = self._clock.now()
        for key in map(text_key, served):
            if key in self._models:
                self._wanted_s[key] = now_s
        for key, wanted_s in list(self._wanted_s.items()):
            if now_s - wanted_s > KEPT_S:
                del self._models[key], self._wanted_s[key]


async def _fetch(fingerprint: str, address: str, token: str) -> dict[str, bytes]:
    parts: dict[str, list[bytes]] = {}
    size = 0
    async with dial(address) as channel:
        stub = internal_pb2_grpc.ReplicaStub(channel)  # type: ignore[no-untyped-call]
        request = api_pb2.TextFilesRequest(fingerprint=fingerprint)
        async for chunk in stub.TextFiles(request, metadata=((SESSION_KEY, token),)):
            parts.setdefault(chunk.name, []).append(chunk.data)
            size += len(chunk.data)
            if size > FILES_BYTES_MAX or len(parts) > FILE_NAMES_MAX:
                raise Incompatible("The replica's text files are larger than their limit.")
    return {name: b"".join(chunks) for name, chunks in parts.items()}
