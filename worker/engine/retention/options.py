"""NAME:key=value,... of a retention policy, read with one sentence for whatever is wrong. It knows
no policy."""

from __future__ import annotations

import re

from seams.errors import InvalidRequest

NONE = "none"  # no policy
RESUME = "resume"  # of any policy: what it leaves of a turn is kept for the next one
REQUESTS = "requests"  # none but what requests ask for
EPICACHE = "epicache"  # states made beforehand, which lie in tiers
SCORED = ("triattention", "snapkv")  # by stored keys
POLICIES = (NONE, REQUESTS, "streaming", *SCORED, EPICACHE)

TEXT_BYTES_MAX = 256
COUNT_MAX = 1 << 20
_FLAGS = (RESUME,)  # options without a value


class Options:
    """The name and the options of one text. What was not asked for by `done` is unknown."""

    def __init__(self, text: str) -> None:
        """Raises InvalidRequest if it is not of that form."""
        if len(text.encode()) > TEXT_BYTES_MAX:
            raise InvalidRequest(f"A retention policy has at most {TEXT_BYTES_MAX} bytes.")
        named = [word for word in re.findall("[a-z]+", text) if word in POLICIES]
        if len(named) > 1:
            raise InvalidRequest(
                f"A request has one retention policy; this one names {named[0]} and {named[1]}."
            )
        self.name, _, rest = text.partition(":")
        self._left: dict[str, str] = {}
        self._asked: set[str] = set()
        for part in rest.split(",") if rest else ():
            key, equals, value = part.partition("=")
            flag = key in _FLAGS and not equals
            if not (flag or (key and equals and value)) or key in self._left:
                raise InvalidRequest(
                    "A retention policy is written NAME or NAME:KEY=VALUE,..., each key once."
                )
            self._left[key] = value
            self._asked.add(key)

    def count(self, key: str, default: int, least: int = 1, most: int = COUNT_MAX) -> int:
        """A whole number from `least` to `most`."""
        text = self._left.pop(key, str(default))
        if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
            raise InvalidRequest(f"{self.name}'s {key} is a whole number from {least} to {most}.")
        return int(text)

    def share(self, key: str, default: float) -> float:
        """A number from 0 to 10."""
        text = self._left.pop(key, str(default))
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= 10.0:
            raise InvalidRequest(f"{self.name}'s {key} is a number from 0 to 10.")
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """One of these, the first if it is not there."""
        text = self._left.pop(key, choices[0])
        if text not in choices:
            raise InvalidRequest(f"{self.name}'s {key} is one of {', '.join(choices)}.")
        return text

    def flag(self, key: str) -> bool:
        """Whether it is there, without a value."""
        if self._left.pop(key, ""):
            raise InvalidRequest(f"{self.name}'s {key} takes no value.")
        return key in self._asked

    def has(self, key: str) -> bool:
        """Whether it is there and not asked for yet."""
        return key in self._left

    def done(self) -> None:
        """Raises InvalidRequest if there is an option that nobody asked for."""
        if self._left:
            raise InvalidRequest(f"{self.name} has no option {sorted(self._left)[0][:32]}.")
