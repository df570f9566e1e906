"""Text models by fingerprint, fetched from the replicas that serve them and built off the loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from banyan.v1 import api_pb2, internal_pb2, internal_pb2_grpc
from router.service.executors import SESSION_KEY, dial
from router.text.model import TextModel
from seams.errors import Incompatible

FILES_BYTES_MAX = 256 * 1024 * 1024
FILE_NAMES_MAX = 16
FETCH_S_MAX = 8.0
KEPT_MAX = 16


def text_key(served: internal_pb2.ServedModel) -> tuple[str, str]:
    """What tells text models apart: (tokenizer, template) fingerprints."""
    return served.tokenizer_fingerprint, served.template_fingerprint


class TextCache:
    """The most recently attached models' text sides."""

    def __init__(self) -> None:
        self._models: OrderedDict[tuple[str, str], TextModel] = OrderedDict()
        self._building: dict[tuple[str, str], asyncio.Lock] = {}

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
        async with self._building.setdefault(key, asyncio.Lock()):
            if key not in self._models:
                async with asyncio.timeout(FETCH_S_MAX):
                    files = await _fetch(key[0], address, token)
                self._models[key] = await asyncio.to_thread(TextModel.verified, files, *key)
            self._models.move_to_end(key)
        while len(self._models) > KEPT_MAX:
            dropped, _ = self._models.popitem(last=False)
            self._building.pop(dropped, None)


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
