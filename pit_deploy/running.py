"""`run`: one prompt through a bundle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pit_deploy.bundle import Bundle
from pit_deploy.chat import render_directory
from pit_deploy.errors import ContextFullError, InputError
from pit_deploy.generate import Generation, TextStream, generate
from pit_deploy.runtimes import Runtime, open_runtime
from pit_deploy.sampling import SamplingOptions


@dataclass(frozen=True)
class Answer:
    """The text of a generation and how it came about."""

    text: str
    prompt_ids: list[int]
    generation: Generation

    def to_dict(self) -> dict[str, Any]:
        """The object that `run --json` writes (docs/cli.md)."""
        g = self.generation
        return {
            "text": self.text,
            "prompt_ids": self.prompt_ids,
            "ids": list(g.ids),
            "finish_reason": g.finish_reason,
            "stop_id": g.stop_id,
            "prefill_seconds": g.prefill_seconds,
            "decode_seconds": g.decode_seconds,
            "tokens_per_second": g.tokens_per_second,
        }


def run(
    bundle: str | Path | Bundle,
    prompt: str,
    *,
    max_new_tokens: int = 256,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int = 0,
    chat: bool = False,
    threads: int | None = None,
    runtime: Runtime | None = None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Generate after `prompt`. Options that are None come from the bundle's generation_config.json.

    With `chat` the prompt is a user's message in the model's own template. `on_text` gets each new piece of
    text. Raises `InputError` for an empty prompt and `ContextFullError` for one that is too long, before
    anything runs.
    """
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    given: dict[str, Any] = dict(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty
    )
    options = replace(
        SamplingOptions.from_generation_config(bundle.generation_config, seed=seed),
        **{name: value for name, value in given.items() if value is not None},
    )
    ids = encode_prompt(bundle, prompt, chat=chat)
    if len(ids) > bundle.manifest.context_length:
        raise ContextFullError(0, len(ids), bundle.manifest.context_length)
    opened = runtime or open_runtime(bundle, threads=threads)
    text = TextStream(bundle.tokenizer)
    pieces: list[str] = []

    def emit(piece: str) -> None:
        pieces.append(piece)
        if piece:
            on_text(piece)

    generation = generate(
        opened,
        ids,
        max_new_tokens=max_new_tokens,
        options=options,
        stop_ids=bundle.manifest.end_ids,
        on_token=lambda id: emit(text.push(id)),
    )
    emit(text.finish())
    return Answer("".join(pieces), ids, generation)


def encode_prompt(bundle: Bundle, prompt: str, *, chat: bool = False) -> list[int]:
    """The ids of a prompt: as the tokenizer has it, or as one user message in the chat template."""
    if not prompt.strip():
        raise InputError("The prompt is empty; give some text with --prompt.")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"The prompt is not valid text: character {error.start} is half a pair.") from error
    if not chat:
        return list(bundle.tokenizer.encode(prompt).ids)
    text = render_directory(bundle.path, [{"role": "user", "content": prompt}])
    return list(bundle.tokenizer.encode(text, add_special_tokens=False).ids)
