"""Direct streams: the replica sends token ids, the text is made here. No I/O.

Loads the tokenizers package (through router.text), which is why clients import it on first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from banyan import wire
from banyan.events import ChoiceFinished, Delta, Event, Finished, FinishReason, Started
from banyan.v1 import api_pb2, internal_pb2
from router.text.model import TextModel
from router.text.output import ChoiceText
from seams.errors import BanyanError, InvalidRequest, NoReplica, Unauthenticated, from_status


def text_model(chunks: Iterable[api_pb2.FileChunk]) -> TextModel:
    """The tokenizer from the files that a router streamed. Raises Incompatible."""
    files: dict[str, bytes] = {}
    for chunk in chunks:
        files[chunk.name] = files.get(chunk.name, b"") + chunk.data
    return TextModel(files)


def pick_request(request: api_pb2.GenerateRequest) -> api_pb2.PickRequest:
    """What to ask a router. Raises InvalidRequest for stop strings."""
    if request.stop:
        raise InvalidRequest("A direct stream cannot have stop strings.")
    return api_pb2.PickRequest(request=request)


def replica_error(error: BanyanError) -> BanyanError:
    """A ticket that its replica refuses is out of date, for it restarted: pick again."""
    return NoReplica(error.message) if isinstance(error, Unauthenticated) else error


class DirectStream:
    """One attempt at one replica. `feed` mutates it; frames come in order."""

    def __init__(
        self,
        request: api_pb2.GenerateRequest,
        pick: api_pb2.PickResponse,
        model: TextModel | None,
    ) -> None:
        self._pick = pick
        sampling = request.sampling
        emitted = request.resume.token_ids
        self._prompt_tokens = pick.decision.prompt_tokens
        prompt = pick.token_ids[: self._prompt_tokens]  # the ids emitted so far follow it
        context = () if request.HasField("chat") else tuple(prompt)
        self._texts = [
            ChoiceText(model.detokenizer(context)) if model is not None else None
            for _ in range(max(1, sampling.n))
        ]
        for token_id in emitted:  # their text was given out before the stream broke
            self._push(0, token_id)
        self.request = internal_pb2.DirectRequest(
            ticket=pick.ticket, token_ids=pick.token_ids, no_cache=request.no_cache
        )
        self.request.sampling.CopyFrom(sampling)
        self.request.sampling.seed = pick.seed

    def started(self, label: str) -> Started:
        """The event that a router would have sent."""
        pick = self._pick
        return Started(
            pick.request_id, pick.seed, pick.model, pick.replica, self._prompt_tokens, label
        )

    def feed(self, frame: internal_pb2.Frame) -> Iterator[Event]:
        """The events of one frame. Raises the typed error that ended the request."""
        for emission in frame.emissions:
            if emission.HasField("error"):
                status = emission.error
                retry_s = status.retry_after_ms / 1000 or None
                raise from_status(status.code, status.message, retry_s)
            yield from self._emission(emission)

    def _emission(self, emission: internal_pb2.Emission) -> Iterator[Event]:
        choice, ids = emission.choice, tuple(emission.token_ids)
        if ids:
            text = "".join(self._push(choice, token_id) for token_id in ids)
            yield Delta(choice, emission.position, ids, text, wire.logprobs(emission.logprobs))
        if emission.finish:
            written = self._texts[choice]
            rest = written.flush() if written is not None else ""
            yield ChoiceFinished(choice, FinishReason(emission.finish), rest)
        if emission.last:
            yield Finished(wire.usage(emission.usage), wire.decision(self._pick.decision))

    def _push(self, choice: int, token_id: int) -> str:
        text = self._texts[choice]
        return text.push(token_id) if text is not None else ""
