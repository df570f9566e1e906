"""The text of one generated choice: detokenizer, then stop strings. Knows token counts, not ids."""

from __future__ import annotations

from collections.abc import Sequence

from router.text.detokenize import Detokenizer
from router.text.stops import StopMatcher


class ChoiceText:
    """Stop strings are looked for in the text of the tokens after the first `min_tokens`."""

    def __init__(
        self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._unwatched = min_tokens

    @property
    def stop(self) -> str:
        """The stop string that matched, or ""."""
        return self._matcher.stop

    def push(self, token_id: int) -> str:
        """Text to give out after this token. Once `stop` is set nothing more may be pushed."""
        text = self._detokenizer.push(token_id)
        if self._unwatched > 0:
            self._unwatched -= 1
            return text
        return self._matcher.push(text) if text else ""

    def flush(self) -> str:
        """The rest, when the choice ended without a stop string; may still find one."""
        rest = self._detokenizer.flush()
        text = self._matcher.push(rest) if rest else ""
        return text if self.stop else text + self._matcher.flush()
