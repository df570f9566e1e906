"""Renders chat messages into a model's prompt format. Knows templates, not tokens.

The environment follows what templates published for transformers' `apply_chat_template` rely on:
block trimming, loop controls, `tojson` without HTML escapes, `raise_exception`, `strftime_now` and
the tokenizer's special tokens as variables. Templates come with models, so they run sandboxed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from seams.errors import Incompatible, InvalidRequest

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class _Refused(jinja2.TemplateError):
    """The template itself called raise_exception."""


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; when serving its body just renders."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance variable

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that takes no underscore names: those lead to the interpreter's internals."""

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError("underscore names are closed to templates")


def _namespace(*args: Any, **kwargs: Any) -> _Namespace:
    attributes = dict(*args, **kwargs)
    for name in attributes:
        _check_name(name)
    return _Namespace(attributes)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    """In UTC: the same chat renders the same prompt at every router, whatever its time zone. A
    chat that is resumed on another day renders that day: Resume carries no time."""
    return datetime.now(UTC).strftime(form)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _namespace
    return environment


class ChatTemplate:
    """One compiled template. Raises Incompatible if `source` is not a template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError:
            raise Incompatible("The model's chat template cannot be compiled.") from None

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt for (role, content) messages, ending where the assistant speaks.

        Raises InvalidRequest if the template refuses them; its own words are quoted only where
        they stand in the template, so that no prompt can come back in an error text.
        """
        chat = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(
                messages=chat,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except _Refused as refused:
            words = refused.message or ""
            quoted = f": {words}" if words and words in self._source else "."
            raise InvalidRequest(f"The chat template refuses these messages{quoted}") from None
        except Exception:  # templates are foreign code: whatever they raise ends this request only
            raise InvalidRequest("The chat template cannot render these messages.") from None


def special_tokens(*configs: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens; earlier configs win. An entry is a string or {"content": ...}."""
    found: dict[str, str] = {}
    for config in configs:
        for name in SPECIAL_TOKENS:
            value = config.get(name)
            if isinstance(value, Mapping):
                value = value.get("content")
            if isinstance(value, str):
                found.setdefault(name, value)
    return found


def template_source(template_file: bytes | None, config: Mapping[str, Any]) -> str | None:
    """The template's text: its own file, or tokenizer_config's entry, which may be a named list.

    Raises Incompatible if the file is not text.
    """
    if template_file is not None:
        try:
            return template_file.decode()
        except UnicodeDecodeError:
            raise Incompatible("The model's chat template is not UTF-8.") from None
    entry = config.get("chat_template")
    if isinstance(entry, str):
        return entry
    if isinstance(entry, list):
        named = {e.get("name"): e.get("template") for e in entry if isinstance(e, Mapping)}
        chosen = named.get("default")
        return chosen if isinstance(chosen, str) else None
    return None
