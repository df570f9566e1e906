"""How many tokens a text has, as the model under load counts them. Knows no workload."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from seams.errors import InvalidRequest, ModelLoadError
from seams.textfiles import read_text_files

if TYPE_CHECKING:
    from router.text.model import TextModel

WORDS = "words"  # the name of WordTokens on the command line
ANSWER_S_MAX = 30.0
_PROBE = " tree"


class Counter(Protocol):
    """Counts tokens. Blocking: texts are made before the clock starts."""

    def count(self, text: str) -> int:
        """Tokens of `text` alone, without those that a tokenizer puts around every prompt."""
        ...

    def close(self) -> None:
        """Done with it. Safe to repeat."""
        ...


class WordTokens:
    """One word, one token: for models that have no text (see `loadtest/targets/base.py`)."""

    def count(self, text: str) -> int:
        """Words between blanks."""
        return len(text.split())

    def close(self) -> None:
        """See Counter."""


class ModelTokens:
    """A tokenizer that this process holds."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self._around = len(model.encode_text(""))

    def count(self, text: str) -> int:
        """See Counter."""
        return len(self._model.encode_text(text)) - self._around

    def close(self) -> None:
        """See Counter."""


class EndpointTokens:
    """The endpoint's own `POST /tokenize`, as vLLM and Banyan have it. One connection."""

    def __init__(self, root_url: str, model: str, headers: dict[str, str]) -> None:
        """Raises InvalidRequest if there is no such path."""
        found = urlsplit(root_url)
        secure = found.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(found.netloc, timeout=ANSWER_S_MAX)
        self._path = f"{found.path.rstrip('/')}/tokenize"
        self._model, self._headers = model, headers | {"Content-Type": "application/json"}
        self._around = 2 * self._ask(_PROBE) - self._ask(2 * _PROBE)

    def count(self, text: str) -> int:
        """See Counter."""
        return self._ask(text) - self._around if text else 0

    def close(self) -> None:
        """See Counter."""
        self._connection.close()

    def _ask(self, text: str) -> int:
        body = json.dumps({"model": self._model, "prompt": text})
        try:
            self._connection.request("POST", self._path, body, self._headers)
            answer = self._connection.getresponse()
            found = json.loads(answer.read())
            return int(found["count"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            self._connection.close()
            message = "The endpoint has no /tokenize; name the model's folder with --tokenizer."
            raise InvalidRequest(message) from None


def folder_tokens(path: str) -> Counter:
    """The tokenizer of a model's folder, or words. Raises ModelLoadError."""
    if path == WORDS:
        return WordTokens()
    from router.text.model import TextModel
    from seams.errors import Incompatible

    try:
        return ModelTokens(TextModel(read_text_files(Path(path).expanduser())))
    except (OSError, Incompatible):
        raise ModelLoadError(f"{path} holds no tokenizer that can be read.") from None
