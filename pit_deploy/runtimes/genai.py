"""onnxruntime-genai over a bundle: a client that knows no manifest, with a tokenizer and end ids of its own reading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pit_deploy.bundle import Bundle
from pit_deploy.errors import ContextFullError, InputError, PitDeployError
from pit_deploy.extras import require
from pit_deploy.json_files import read_json
from pit_deploy.manifest import BundleError
from pit_deploy.runtimes.onnxruntime import check_external_data

CONFIG = "genai_config.json"


class GenaiTextRunner:
    """Text in, greedy text out; implements `TextRuntime`.

    It tokenises, samples and stops by itself, by genai_config.json and the tokenizer's files. Raises `BundleError`
    where that file ends texts elsewhere than the manifest, `InputError` where the library cannot open the folder, and
    `MissingExtraError` without it. The library takes its number of threads from genai_config.json.
    """

    name = "genai"

    def __init__(self, bundle: Bundle) -> None:
        check_external_data(bundle)
        check_config(bundle)
        self._genai = require("onnxruntime_genai", "bench")
        self._bundle = bundle
        try:
            self._model = self._genai.Model(str(bundle.path))
            self._tokenizer = self._genai.Tokenizer(self._model)
        except RuntimeError as error:
            raise InputError(
                f"onnxruntime-genai cannot open {bundle.path}: {_reason(error)}; use --runtime onnxruntime."
            ) from error

    def generate(
        self, prompt: str, max_new_tokens: int, *, on_text: Callable[[str], None] = lambda text: None
    ) -> str:
        """The greedy continuation of `prompt`, without it and without an end id's text.

        Raises `ContextFullError` before anything runs.
        """
        ids = self._bundle.tokenizer.encode(prompt).ids
        context = self._bundle.manifest.context_length
        if len(ids) + max_new_tokens > context:
            raise ContextFullError(len(ids), max_new_tokens, context)
        try:
            return self._generate(prompt, max_new_tokens, on_text)
        except RuntimeError as error:
            raise PitDeployError(
                f"onnxruntime-genai failed on {self._bundle.path}: {_reason(error)}; check the bundle with "
                f"pit-deploy verify --runtime onnxruntime."
            ) from error

    def _generate(self, prompt: str, max_new_tokens: int, on_text: Callable[[str], None]) -> str:
        tokens = self._tokenizer.encode(prompt)
        options: Any = self._genai.GeneratorParams(self._model)
        options.set_search_options(max_length=len(tokens) + max_new_tokens, do_sample=False)
        generator = self._genai.Generator(self._model, options)
        generator.append_tokens(tokens)
        stream = self._tokenizer.create_stream()
        ends = set(self._tokenizer.eos_token_ids)
        pieces: list[str] = []
        while not generator.is_done():
            generator.generate_next_token()
            id = int(generator.get_next_tokens()[0])
            if id in ends:
                break
            pieces.append(stream.decode(id))
            on_text(pieces[-1])
        return "".join(pieces)


def check_config(bundle: Bundle) -> None:
    """Raise `BundleError` where the bundle has no genai_config.json, or one that ends texts at other ids."""
    found = read_json(bundle.file(CONFIG)).get("model", {}).get("eos_token_id")
    ends = [] if found is None else list(found) if isinstance(found, list) else [found]
    if sorted(set(ends)) != sorted(set(bundle.manifest.end_ids)):
        raise BundleError(
            "bad_end_id",
            f"{bundle.path / CONFIG} ends a text at {ends}, and the manifest at {list(bundle.manifest.end_ids)}; "
            f"export the bundle again.",
        )


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
