"""TextModel: templates, special tokens, fingerprints; no foreign code escapes as a crash."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
from tokenizers_for_tests import byte_fallback, byte_level, text_files

from router.text.model import TextModel
from router.text.template import ChatTemplate
from seams.errors import Incompatible, InvalidRequest
from seams.textfiles import template_fingerprint, tokenizer_fingerprint

CHAT = [("system", "Be <brief>."), ("user", "Hi")]
SIMPLE = "{% for m in messages %}{{ m.role + ':' + m.content }}\n{% endfor %}"


def test_blocks_are_trimmed_and_special_tokens_are_variables() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n[{{ m['role'] }}]\n  {% endfor %}\nA:"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(CHAT) == "<s>\n[system]\n[user]\nA:"


def test_generation_prompt_json_loop_controls_and_generation_blocks() -> None:
    source = (
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m | tojson }}"
        "{% endfor %}{% generation %}body{% endgeneration %}"
        "{% if add_generation_prompt %}>{% endif %}{{ strftime_now('%%') }}"
        "{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}"
    )
    expected = '{"role": "system", "content": "Be <brief>."}body>%2'
    assert ChatTemplate(source, {}).render(CHAT) == expected


def test_the_date_of_a_template_is_utc_wherever_the_router_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d %H %z') }}", {})
    try:
        for zone in ("UTC-14", "UTC+11"):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            before, shown, after = _utc(), template.render(CHAT), _utc()
            assert shown in (before, after)
    finally:
        monkeypatch.undo()
        time.tzset()


def _utc() -> str:
    return time.strftime("%Y-%m-%d %H +0000", time.gmtime())


def test_a_refusal_is_quoted_only_if_it_stands_in_the_template() -> None:
    fixed = ChatTemplate("{{ raise_exception('Roles must alternate.') }}", {})
    with pytest.raises(InvalidRequest, match=r"Roles must alternate\."):
        fixed.render(CHAT)
    leaking = ChatTemplate("{{ raise_exception('No: ' + messages[1].content) }}", {})
    with pytest.raises(InvalidRequest) as refusal:
        leaking.render([("user", "a"), ("user", "secret words")])
    assert "secret" not in refusal.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ range(10**9) | list }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].role.x }}",
        "{{ none + 1 }}",
    ],
)
def test_a_hostile_or_broken_template_ends_the_request_only(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(CHAT)


def test_a_template_that_does_not_compile_is_incompatible() -> None:
    with pytest.raises(Incompatible):
        ChatTemplate("{% for %}", {})


def test_template_comes_from_its_file_or_the_configuration() -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for config, extra, expected in (
        ({"chat_template": "C"}, {}, "C"),
        ({"chat_template": named}, {}, "D"),
        ({"chat_template": named}, {"chat_template.jinja": b"F"}, "F"),
    ):
        model = TextModel({**text_files(byte_level(), config), **extra})
        assert model.decode(model.encode_chat(CHAT)) == expected
    with pytest.raises(InvalidRequest, match="no chat template"):
        TextModel(text_files(byte_level())).encode_chat(CHAT)


def test_special_tokens_around_plain_text_follow_the_configuration() -> None:
    start, end = (byte_fallback().token_to_id(t) for t in ("<s>", "</s>"))
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}

    def encode(**config: bool) -> list[int]:
        return TextModel(text_files(byte_fallback(), {**names, **config})).encode_text("a")

    plain = encode()
    assert encode(add_bos_token=True) == [start, *plain]
    assert encode(add_bos_token=True, add_eos_token=True) == [start, *plain, end]
    assert encode(add_bos_token=False) == plain


def test_rendered_chats_get_no_further_special_tokens() -> None:
    config = {"bos_token": "<s>", "add_bos_token": True, "chat_template": "{{bos_token}}" + SIMPLE}
    model = TextModel(text_files(byte_fallback(), config))
    start = byte_fallback().token_to_id("<s>")
    assert model.encode_chat(CHAT).count(start) == 1


def test_fingerprints_are_verified() -> None:
    files = text_files(byte_level(), {"chat_template": SIMPLE})
    prints = tokenizer_fingerprint(files), template_fingerprint(files)
    model = TextModel.verified(files, *prints)
    assert (model.tokenizer_fingerprint, model.template_fingerprint) == prints
    changed = {**files, "chat_template.jinja": b"other"}
    with pytest.raises(Incompatible, match="fingerprints"):
        TextModel.verified(changed, *prints)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": b"not json"},
        {"tokenizer.json": b"\xff\xfe"},
        {"tokenizer.json": b"{}"},
        {**text_files(byte_level()), "tokenizer_config.json": b"[1]"},
        {**text_files(byte_level()), "tokenizer_config.json": b"{"},
        {**text_files(byte_level()), "chat_template.jinja": b"\xff"},
    ],
)
def test_damaged_files_are_incompatible(files: dict[str, bytes]) -> None:
    with pytest.raises(Incompatible):
        TextModel(files)


def test_truncation_and_padding_in_the_file_are_ignored() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    ids = TextModel(text_files(tokenizer)).encode_text("banyan tree many trunks")
    assert ids == byte_level().encode("banyan tree many trunks").ids and len(ids) > 2


def test_a_served_chat_loads_neither_torch_nor_transformers() -> None:
    files = text_files(byte_level(), {"chat_template": SIMPLE})
    code = (
        "import sys, json; from router.text.model import TextModel\n"
        "files = {k: v.encode() for k, v in json.load(sys.stdin).items()}\n"
        "m = TextModel(files); ids = m.encode_chat([('user', 'hi')])\n"
        "d = m.detokenizer(); print(''.join(map(d.push, ids)))\n"
        "sys.exit(any(n in sys.modules for n in ('torch', 'transformers', 'grpc')))"
    )
    payload = json.dumps({name: text.decode() for name, text in files.items()})
    done = subprocess.run(
        [sys.executable, "-c", code], input=payload, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "user:hi\n\n"
