from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pit_deploy.chat import chat_template, render_chat, render_directory, special_tokens, tokenizer_config
from pit_deploy.errors import InputError

pytest.importorskip("transformers")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELLO = [{"role": "user", "content": " Hello "}]


def test_renders_with_its_variables() -> None:
    text = render_chat(TEMPLATE, HELLO, bos_token="<s>", eos_token="</s>")
    assert text == "<s><|user|>Hello</s>\n<|assistant|>"
    assert render_chat(TEMPLATE, HELLO, add_generation_prompt=False) == "<|user|>Hello\n"


def test_equals_the_tokenizers_own_rendering(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"a": 0, "<s>": 1, "</s>": 2}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    want = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert render_directory(tmp_path, HELLO) == want


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (messages | first).__class__.__base__.__subclasses__() }}",
        "{% for m in messages %}{{ ''['__class__']['__mro__'] }}{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages.clear() }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_a_template_that_leaves_the_sandbox_is_refused(template: str) -> None:
    messages = [dict(HELLO[0])]
    with pytest.raises(InputError, match="was refused") as caught:
        render_chat(template, messages)
    assert messages == HELLO
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' }}\n{% if %}", "syntax error in line 2"),
        ("{% for m in messages %}", "syntax error in line 1"),
        ("{{ raise_exception('Roles must alternate!') }}", "stopped with: Roles must alternate!"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
        ("{% include 'secret.txt' %}", "stopped|failed"),
    ],
)
def test_other_failures_are_one_sentence(template: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        render_chat(template, HELLO)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("The chat template ")


@pytest.mark.parametrize("messages", [[], [{"content": "no role"}], ["text"]])
def test_messages_are_checked(messages: Any) -> None:
    with pytest.raises(InputError, match="at least one message"):
        render_chat(TEMPLATE, messages)


def write(folder: Path, config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no chat template .* use --prompt without --chat"):
        chat_template(tmp_path)
    write(tmp_path, {"chat_template": None})
    with pytest.raises(InputError, match="has no chat template"):
        chat_template(tmp_path)
    write(tmp_path, {"chat_template": "one"})
    assert chat_template(tmp_path) == "one"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    write(tmp_path, {"chat_template": named})
    assert chat_template(tmp_path) == "two"
    write(tmp_path, {"chat_template": named[:1]})
    with pytest.raises(InputError, match=r"\['tool_use'\] and none is 'default'"):
        chat_template(tmp_path)
    write(tmp_path, {"chat_template": 5})
    with pytest.raises(InputError, match="must be text, but is a int"):
        chat_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file\n", encoding="utf-8")
    assert chat_template(tmp_path) == "file\n"
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(InputError, match="not UTF-8 text"):
        chat_template(tmp_path)


def test_tokenizer_config_that_cannot_be_read(tmp_path: Path) -> None:
    assert tokenizer_config(tmp_path) == {}
    write(tmp_path, ["list"])
    with pytest.raises(InputError, match="an object is expected"):
        tokenizer_config(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="not valid JSON"):
        tokenizer_config(tmp_path)


def test_special_tokens() -> None:
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "pad_token": None,
        "add_bos_token": True,
        "model_max_length": 8,
    }
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}
