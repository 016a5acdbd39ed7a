"""Sources that are made into a Hugging Face directory first: hub ids and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pit_deploy.errors import InputError
from pit_deploy.extras import require


def download(repo: str) -> Path:
    """A snapshot of a hub repository, in the hub client's cache."""
    hub = require("huggingface_hub", "onnx")
    patterns = ["*.json", "*.safetensors", "*.jinja", "*.model", "LICENSE*", "README.md"]
    try:
        return Path(hub.snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds: no network, no such repository, no right
        raise InputError(
            f"{repo} is not a local path and could not be fetched from the hub: {_one_line(error)}"
        ) from error


def require_gguf_packages() -> tuple[Any, Any]:
    """transformers and torch, once all that reading GGUF needs is there."""
    require("gguf", "onnx")
    return require("transformers", "onnx"), require("torch", "onnx")


def write_gguf_as_hf(file: Path, directory: Path) -> None:
    """Write a GGUF file as a plain Hugging Face directory (dequantised), through transformers."""
    transformers, torch = require_gguf_packages()
    from pit_deploy.model import quiet

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        with quiet():
            model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    except Exception as error:  # a damaged file fails in many ways inside the reader
        raise InputError(f"{file} cannot be read as GGUF: {_gguf_fault(file) or _one_line(error)}") from error
    # transformers refuses to save a model that it takes for quantised; these weights are plain floats now.
    for holder in (model.config, model):
        if hasattr(holder, "quantization_config"):
            del holder.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    with quiet():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _gguf_fault(file: Path) -> str | None:
    """What is wrong with the file itself; None where its structure is whole.

    transformers asks this too late: it takes what it cannot parse for a config.json, and complains of that.
    """
    import numpy as np

    try:
        with np.errstate(all="ignore"):
            require("gguf", "onnx").GGUFReader(file)
    except Exception as error:  # the reader runs off the end of a damaged file in many ways
        return f"it is damaged ({file.stat().st_size} bytes, {_one_line(error)}); fetch it again."
    return None


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
