"""Chat templates: found in a model's directory, rendered in transformers' sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pit_deploy.errors import InputError
from pit_deploy.extras import require
from pit_deploy.generation_config import token_text
from pit_deploy.json_files import read_json_if_there


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text that the template makes of `messages`; `variables` are what else it may read, `bos_token` say.

    The template is someone else's program. It runs in transformers' own sandbox, which sees plain data only;
    any way it fails is an `InputError` of one sentence.
    """
    jinja2 = require("jinja2", "onnx")
    transformers_chat = require("transformers.utils.chat_template_utils", "onnx")
    if not messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
        raise InputError('A chat takes at least one message, each a mapping with "role" and "content".')
    try:
        rendered, _ = transformers_chat.render_jinja_template(
            conversations=[list(messages)],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
    except jinja2.exceptions.SecurityError as error:
        raise InputError(
            f"The chat template was refused because it leaves the sandbox: {_line(error)}"
        ) from error
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise InputError(
            f"The chat template has a syntax error in line {error.lineno}: {_line(error)}"
        ) from error
    except jinja2.exceptions.TemplateError as error:  # raise_exception('...') and undefined names come here
        raise InputError(f"The chat template stopped with: {_line(error)}") from error
    except Exception as error:  # whatever else a foreign program does: types, sizes, divisions
        raise InputError(f"The chat template failed with {type(error).__name__}: {_line(error)}") from error
    text: str = rendered[0]
    return text


def chat_template(directory: Path | str) -> str:
    """The model's chat template: chat_template.jinja, else the (default) one in tokenizer_config.json.

    Raises `InputError` where there is none.
    """
    directory = Path(directory)
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{file} is not UTF-8 text (byte {error.start}).") from error
    value = tokenizer_config(directory).get("chat_template")
    if isinstance(value, list):
        named = {
            entry["name"]: entry.get("template")
            for entry in value
            if isinstance(entry, dict) and isinstance(entry.get("name"), str)
        }
        if "default" not in named:
            raise InputError(
                f"The chat templates of {directory} are named {sorted(named)} and none is 'default'; "
                f"add one as chat_template.jinja, or use --prompt without --chat."
            )
        value = named["default"]
    if value is None:
        raise InputError(
            f"{directory} has no chat template (neither chat_template.jinja nor chat_template in "
            f"tokenizer_config.json); use --prompt without --chat."
        )
    if not isinstance(value, str):
        raise InputError(
            f"chat_template in {directory / 'tokenizer_config.json'} must be text, "
            f"but is a {type(value).__name__}."
        )
    return value


def has_chat_template(directory: Path | str) -> bool:
    """Whether the directory has a template of its own, in either place."""
    directory = Path(directory)
    return (directory / "chat_template.jinja").is_file() or bool(
        tokenizer_config(directory).get("chat_template")
    )


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The variables `bos_token`, `eos_token` and so on that templates read, from tokenizer_config.json."""
    texts = {name: token_text(value) for name, value in tokenizer_config.items() if name.endswith("_token")}
    return {name: text for name, text in texts.items() if text is not None}


def tokenizer_config(directory: Path | str) -> dict[str, Any]:
    """tokenizer_config.json of the directory; empty where it has none."""
    return read_json_if_there(Path(directory) / "tokenizer_config.json")


def render_directory(
    directory: Path | str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """`render_chat` with the template and the special tokens of a model's directory (a bundle is one)."""
    return render_chat(
        chat_template(directory),
        messages,
        add_generation_prompt=add_generation_prompt,
        **(special_tokens(tokenizer_config(directory)) | variables),
    )


def _line(error: Exception) -> str:
    """An error's message on one line, with a full stop; jinja2's may span several lines."""
    text = " ".join(str(getattr(error, "message", None) or error).split()) or "no message"
    return text if text.endswith((".", "!", "?")) else text + "."
