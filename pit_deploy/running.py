"""`run`: one prompt through a bundle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pit_deploy.bundle import Bundle
from pit_deploy.chat import render_directory
from pit_deploy.errors import ContextFullError, InputError
from pit_deploy.generate import FinishReason, Generation, TextStream, generate
from pit_deploy.runtimes import TEXT_FIT, Runtime, open_runtime, open_text_runtime
from pit_deploy.sampling import SamplingOptions


@dataclass(frozen=True)
class Answer:
    """The text of a generation and how it came about."""

    text: str
    prompt_ids: list[int]
    generation: Generation
    timed: bool = True
    """False where an emulator's time would say nothing; it is not shown then."""

    def to_dict(self) -> dict[str, Any]:
        """The object that `run --json` writes (docs/cli.md)."""
        g = self.generation
        return {
            "text": self.text,
            "prompt_ids": self.prompt_ids,
            "ids": list(g.ids),
            "finish_reason": g.finish_reason,
            "stop_id": g.stop_id,
            "prefill_seconds": g.prefill_seconds if self.timed else None,
            "decode_seconds": g.decode_seconds if self.timed else None,
            "tokens_per_second": g.tokens_per_second if self.timed else None,
            "speculation": None if g.speculation is None else g.speculation.to_dict(),
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
    speculate: bool = False,
    runtime: Runtime | str | None = None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Generate after `prompt`. Options that are None come from the bundle's generation_config.json.

    With `chat` the prompt is a user's message in the model's own template. With `speculate` the text is the same,
    sooner where it repeats earlier text (docs/speculation.md); a `runtime` must then have been opened for it.
    `on_text` gets each new piece of text. Raises `InputError` for an empty prompt and `ContextFullError` for one
    that is too long, before anything runs.
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
    if isinstance(runtime, str) and runtime in TEXT_FIT:
        if speculate or any(value is not None for value in given.values()):
            raise InputError(
                f"{runtime} answers greedily and by its own rules; leave sampling options and --speculate out."
            )
        return _run_text(bundle, ids, prompt, chat, max_new_tokens, runtime, threads, on_text)
    if runtime is None or isinstance(runtime, str):
        opened = open_runtime(bundle, runtime, threads=threads, speculate=speculate)
    else:
        opened = runtime
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
        speculate=speculate,
    )
    emit(text.finish())
    return Answer("".join(pieces), ids, generation, timed=not getattr(opened, "emulated", False))


def _run_text(
    bundle: Bundle,
    ids: list[int],
    prompt: str,
    chat: bool,
    max_new_tokens: int,
    runtime: str,
    threads: int | None,
    on_text: Callable[[str], None],
) -> Answer:
    """The greedy answer of a stock runner. Its ids are those of its text, and its times are not taken apart."""
    opened = open_text_runtime(bundle, runtime, threads=threads)
    shown = render_directory(bundle.path, [{"role": "user", "content": prompt}]) if chat else prompt
    pieces: list[str] = []

    def emit(piece: str) -> None:
        pieces.append(piece)
        on_text(piece)

    started = time.perf_counter()
    text = opened.generate(shown, max_new_tokens, on_text=emit)
    seconds = time.perf_counter() - started
    new = tuple(bundle.tokenizer.encode(text, add_special_tokens=False).ids)
    reason: FinishReason = "length" if len(pieces) >= max_new_tokens else "stop"
    return Answer(text, ids, Generation(new, reason, None, len(ids), 0.0, seconds))


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
