"""transformers.js, in a page of headless Chromium, on the web view of a bundle: a client that knows no manifest."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from pit_deploy.bundle import Bundle
from pit_deploy.errors import ContextFullError
from pit_deploy.runtimes.browser import Worker, check_size
from pit_deploy.runtimes.onnxruntime import check_external_data
from pit_deploy.web_view import web_view


class TransformersJsRunner:
    """Text in, greedy text out; implements `TextRuntime`.

    transformers.js tokenises, generates and stops by itself, by the files of the web view; `ids` are those that it
    generated last, its end id among them. Raises `InputError` where the bundle cannot have a web view and where Node,
    the packages or the browser are missing, `PitDeployError` where its tokenizer makes other ids of the check texts.
    """

    name = "transformers.js"

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        check_size(bundle)
        check_external_data(bundle)
        self._bundle = bundle
        self._folder = tempfile.TemporaryDirectory(prefix="pit-deploy-web-")
        view = web_view(bundle, Path(self._folder.name) / "view")
        self.ids: list[int] = []
        self._worker = Worker(view, self.name, threads, bundle)

    def generate(
        self, prompt: str, max_new_tokens: int, *, on_text: Callable[[str], None] = lambda text: None
    ) -> str:
        """The greedy continuation of `prompt`, without it. Raises `ContextFullError` before anything runs."""
        ids = self._bundle.tokenizer.encode(prompt).ids
        context = self._bundle.manifest.context_length
        if len(ids) + max_new_tokens > context:
            raise ContextFullError(len(ids), max_new_tokens, context)
        message = {"do": "generate", "prompt": prompt, "max_new_tokens": max_new_tokens}
        self._worker.ask(message, what="generating text")
        text, self.ids = str(self._worker.answer["text"]), list(self._worker.answer["ids"])
        on_text(text)
        return text

    def close(self) -> None:
        """End the browser."""
        self._worker.close()
        self._folder.cleanup()
