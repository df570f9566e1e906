"""Finds stop strings in streamed text, holding back only what may still become one."""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """One stop string, matched a character at a time (Knuth, Morris and Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._border = [0] * len(text)
        for i in range(1, len(text)):
            self._border[i] = self._step(self._border[i - 1], text[i])
        self.matched = 0  # length of the longest prefix that ends here

    def _step(self, matched: int, char: str) -> int:
        while matched and self.text[matched] != char:
            matched = self._border[matched - 1]
        return matched + (self.text[matched] == char)

    def advance(self, char: str) -> bool:
        """Take one more character; True when the whole string has been seen."""
        self.matched = self._step(self.matched, char)
        return self.matched == len(self.text)


class StopMatcher:
    """Several stop strings over one text. The match that is complete first wins; of those that end
    together the longest. Independent of how the text was cut into pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""
        self.stop = ""  # the string that matched; nothing may be pushed afterwards

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a match. Mutates the matcher."""
        assert not self.stop
        if not self._patterns:
            return text
        pending = self._held + text
        for index, char in enumerate(text, start=len(self._held)):
            complete = [p.text for p in self._patterns if p.advance(char)]
            if complete:
                self.stop = max(complete, key=len)
                self._held = ""
                return pending[: index + 1 - len(self.stop)]
        keep = max(pattern.matched for pattern in self._patterns)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def flush(self) -> str:
        """What was held back and is output after all."""
        held, self._held = self._held, ""
        return held
