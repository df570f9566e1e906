"""Which routers may open an Execute stream: those attached to this replica now, by their token."""

from __future__ import annotations

from seams.proof import matches


class Sessions:
    """Tokens of the sessions in force. A handful of entries: one per router."""

    def __init__(self) -> None:
        self._tokens: list[str] = []

    def open(self, token: str) -> None:
        """Accept `token` from now on."""
        self._tokens.append(token)

    def close(self, token: str) -> None:
        """No longer accept it for new streams; streams already open go on."""
        self._tokens.remove(token)

    def valid(self, token: str) -> bool:
        """True for a session in force. Compares with all of them in constant time each."""
        return sum([matches(known, token) for known in self._tokens]) > 0
