"""What waits to be written to one client: bounded, and merged while it waits. Knows no network."""

from __future__ import annotations

from collections.abc import Sequence

from banyan.v1 import api_pb2, common_pb2

OUTBOX_BYTES_MAX = 1 << 20  # of one stream
TOKEN_BYTES = 256  # reckoned for one waiting token with its text, for the credit of a stream
LOGPROB_BYTES = 16  # and for each logprob it carries


def credit_for(choices: int, logprobs: int | None, credit_tokens: int) -> int:
    """How many tokens of each choice may be under way so that all of them fit the outbox."""
    each = TOKEN_BYTES + (0 if logprobs is None else LOGPROB_BYTES * (1 + logprobs))
    return max(1, min(credit_tokens, OUTBOX_BYTES_MAX // (each * max(1, choices))))


class Outbox:
    """Responses in order. Deltas of one choice merge into one as long as they wait."""

    def __init__(self) -> None:
        self._waiting: list[api_pb2.GenerateResponse] = []
        self._deltas: dict[int, api_pb2.Delta] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def overfull(self) -> bool:
        """True once more waits than one stream may hold."""
        return self._bytes > OUTBOX_BYTES_MAX

    def put(self, response: api_pb2.GenerateResponse) -> None:
        """Append anything but a Delta."""
        self._waiting.append(response)
        self._bytes += response.ByteSize()

    def put_delta(
        self,
        choice: int,
        position: int,
        token_ids: Sequence[int],
        text: str,
        logprobs: Sequence[common_pb2.PositionLogprobs],
    ) -> None:
        """Append new tokens of a choice; `position` follows on the choice's last one."""
        delta = self._deltas.get(choice)
        if delta is None:
            response = api_pb2.GenerateResponse()
            delta = self._deltas[choice] = response.delta
            delta.choice, delta.position = choice, position
            self._waiting.append(response)
        assert delta.position + len(delta.token_ids) == position
        delta.token_ids.extend(token_ids)
        delta.logprobs.extend(logprobs)
        if text:
            delta.text += text
        size = 5 * len(token_ids) + 4 * len(text)
        self._bytes += size + sum(entry.ByteSize() for entry in logprobs)

    def take(self) -> list[api_pb2.GenerateResponse]:
        """Everything that waits, oldest first; the outbox is empty afterwards."""
        taken, self._waiting = self._waiting, []
        self._deltas.clear()
        self._bytes = 0
        return taken
