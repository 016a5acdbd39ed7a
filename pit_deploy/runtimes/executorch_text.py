"""ExecuTorch's stock runner for language models: text in, greedy text out, with the bundle's own tokenizer.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pit_deploy.bundle import Bundle
from pit_deploy.errors import ContextFullError, InputError, PitDeployError
from pit_deploy.extras import require
from pit_deploy.runtimes.executorch import check_delegate, import_kernels
from pit_deploy.runtimes.executorch_package import EXTRA, import_executorch, without_output

_RUNNER = "executorch.extension.llm.runner"


class ExecutorchTextRunner:
    """`TextLLMRunner` on a bundle; implements `TextRuntime`.

    It tokenises, samples and stops by itself, by what the program says of its end ids. Raises `InputError` where the
    runner cannot read the tokenizer or the program.
    """

    name = "executorch-runner"

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        self._bundle = bundle
        problem = tokenizer_problem(bundle.path, [check.text for check in bundle.manifest.tokenizer_checks])
        if problem is not None:
            raise InputError(f"{bundle.path}: {problem}; use --runtime executorch.")
        check_delegate(bundle.model_path, bundle.manifest.profile)
        portable = import_kernels()
        runner = import_executorch(_RUNNER)
        with without_output():
            if threads is not None:
                portable._unsafe_reset_threadpool(threads)
            portable._threadpool_get_thread_count()
            try:
                self._runner = runner.TextLLMRunner(
                    str(bundle.model_path), str(bundle.path / "tokenizer.json")
                )
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:200]
                raise InputError(
                    f"ExecuTorch's text runner cannot open {bundle.model_path}: {reason}; use --runtime executorch."
                ) from error
        self._config: Any = runner.GenerationConfig
        tokenizer = bundle.tokenizer
        self._ends = {tokenizer.decode([id], skip_special_tokens=False) for id in bundle.manifest.end_ids}

    def generate(
        self, prompt: str, max_new_tokens: int, *, on_text: Callable[[str], None] = lambda text: None
    ) -> str:
        """The greedy continuation of `prompt`, without it and without an end id's text.

        Raises `ContextFullError` before anything runs, and `PitDeployError` for a token that is no text by itself.
        """
        ids = self._bundle.tokenizer.encode(prompt).ids
        context = self._bundle.manifest.context_length
        if len(ids) + max_new_tokens > context:
            raise ContextFullError(len(ids), max_new_tokens, context)
        pieces: list[str] = []
        held = ""  # the text of an end id, which the runner gives as well: no part of the answer where it is the last

        def push(text: str) -> None:
            nonlocal held
            if held:
                pieces.append(held)
                on_text(held)
            held = text if text in self._ends else ""
            if not held:
                pieces.append(text)
                on_text(text)

        begins = self._bundle.manifest.bos_id is not None and ids[:1] == [self._bundle.manifest.bos_id]
        config = self._config(
            echo=False,
            max_new_tokens=max_new_tokens,
            temperature=0.0,
            num_bos=1 if begins else 0,
            warming=True,  # all that it does is to keep the runner from printing text and times by itself
        )
        with without_output():
            self._runner.reset()
            try:
                self._runner.generate(prompt, config, push)
            except UnicodeDecodeError as error:
                raise PitDeployError(
                    "ExecuTorch's text runner gives each token's text by itself, and cannot where a token is a part of "
                    "a character only; use --runtime executorch."
                ) from error
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:200]
                raise PitDeployError(
                    f"ExecuTorch's text runner failed on {self._bundle.model_path}: {reason}; check the bundle "
                    f"with pit-deploy verify --runtime executorch."
                ) from error
        return "".join(pieces)


def tokenizer_problem(directory: Path, texts: Sequence[str]) -> str | None:
    """Why ExecuTorch's C++ tokenizer must not be used for the tokenizer.json in `directory`; None where it may.

    It has to open the file (patterns with a lookahead, say, need a regular expression engine that not every build
    has) and to make of each text what the reference makes of it.
    """
    from pit_deploy.bundle import load_tokenizer

    with without_output():
        tokenizer = require("pytorch_tokenizers", EXTRA).CppHFTokenizer()
        try:
            tokenizer.load(str(directory / "tokenizer.json"))
        except Exception as error:  # a class of its own for each status
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            return f"ExecuTorch's tokenizer cannot read tokenizer.json ({reason})"
        reference = load_tokenizer(directory / "tokenizer.json")
        for text in texts:
            expected = reference.encode(text, add_special_tokens=False).ids
            try:
                found = list(tokenizer.encode(text, 0, 0))
            except Exception as error:
                found = [f"{type(error).__name__}"]
            if found != expected:
                return (
                    f"ExecuTorch's tokenizer makes {found[:8]} of {text[:40]!r}, and the model's own "
                    f"{expected[:8]}"
                )
    return None
