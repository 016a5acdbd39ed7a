"""The folded checkpoint as a Hugging Face directory: what every existing tool can read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pit_deploy.architecture import DecoderConfig
from pit_deploy.errors import InputError
from pit_deploy.export_options import Artifact, ExportOptions
from pit_deploy.folding import FoldedModel, write_folded_into
from pit_deploy.progress import Progress
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.plan import QuantizationPlan

_DTYPES = {"fp32": "float32", "fp16": "float16"}


class HuggingFaceExporter:
    """`--to hf`. Layout `untied` opens in plain transformers; `shared` in pit-deploy alone."""

    name = "hf"
    extra = "onnx"
    default_layout = "untied"
    default_precision = "fp32"
    writes_bundle = False
    profiles = ("default",)

    def grids(self, options: ExportOptions) -> Mapping[int, QuantizationOptions]:
        """None: floats are written."""
        return {}

    def encoder(self, options: ExportOptions) -> None:
        """The quantiser's codes are stored as they are."""

    def check(self, config: DecoderConfig, options: ExportOptions) -> None:
        for name, value in (("--weights", options.weights), ("--tables", options.tables)):
            if value not in _DTYPES:
                raise InputError(f"{name} {value} cannot be written with --to hf; choose fp32 or fp16.")
        if options.searches or options.quantizer is not None:
            raise InputError("--to hf writes floats; leave --quantizer, --max-kl and --max-bytes out.")
        if options.weights != options.tables:
            raise InputError(
                f"--weights {options.weights} and --tables {options.tables} differ; a Hugging Face directory "
                f"has one dtype."
            )

    def write(
        self,
        model: FoldedModel,
        config: DecoderConfig,
        options: ExportOptions,
        plan: QuantizationPlan,
        tokenizer_length: int,
        directory: Path,
        progress: Progress,
    ) -> Artifact:
        write_folded_into(model, directory, dtype=_DTYPES[plan.weights], progress=progress)
        return Artifact("transformers", options.profile or "default", "config.json", [], [], [], [], {})

    def finish(
        self,
        directory: Path,
        config: DecoderConfig,
        *,
        context_length: int,
        bos_id: int | None,
        end_ids: list[int],
    ) -> None:
        """Nothing: a checkpoint needs no more."""
