"""Export to ONNX: one graph, one file of weights, and what onnxruntime-genai reads beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pit_deploy.architecture import DecoderConfig
from pit_deploy.errors import InputError
from pit_deploy.export_options import Artifact, ExportOptions
from pit_deploy.extras import require
from pit_deploy.folding import FoldedModel
from pit_deploy.json_files import read_json_if_there, write_json
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.plan import QuantizationPlan
from pit_export.backbone import Backbone, check_backbone
from pit_export.genai_config import genai_config
from pit_export.onnx_weights import WeightsFile, check_model_file

if TYPE_CHECKING:
    import onnx_ir as ir

    from pit_export.onnx_graph import GraphBuilder
    from pit_export.onnx_operators import Operators

MODEL_FILE, WEIGHTS_FILE = "model.onnx", "model.onnx_data"
PAST, PRESENT = "past_key_values.", "present."
ACCURACY_LEVEL = 4
"""Of MatMulNBits: activations are rounded to int8 by block as they come, for about three times the speed."""
BLOCK_SIZES = (16, 32, 64, 128, 256)
"""What MatMulNBits has fast kernels for."""


class OnnxExporter:
    """Writes `model.onnx` and `model.onnx_data`.

    Profile `default` uses ONNX Runtime's own operators, `standard` those of the ONNX standard alone.
    `accuracy_level` is MatMulNBits's (0: float activations); tensors of fewer bytes than `inline_below` stay
    in the graph file.
    """

    name = "onnx"
    extra = "onnx"
    default_layout = "shared"
    default_precision = "int8"
    writes_bundle = True
    profiles = ("default", "standard")

    def __init__(self, *, accuracy_level: int = ACCURACY_LEVEL, inline_below: int = 1024) -> None:
        self._accuracy_level, self._inline_below = accuracy_level, inline_below

    def grids(self, options: ExportOptions) -> Mapping[int, QuantizationOptions]:
        """None: `MatMulNBits` takes every block size that `check` lets through."""
        return {}

    def encoder(self, options: ExportOptions) -> None:
        """The quantiser's codes are stored as they are."""

    def check(self, config: DecoderConfig, options: ExportOptions) -> None:
        """Raise `InputError` for a profile, a context, a block size or a head that cannot be built."""
        for package in ("onnx", "onnx_ir"):
            require(package, self.extra)
        profile = self._profile(options)
        if profile not in self.profiles:
            raise InputError(
                f"--profile {profile} is not known to onnx; choose {' or '.join(self.profiles)}."
            )
        options.context_length(config)
        if options.block_size not in BLOCK_SIZES:
            raise InputError(
                f"--block-size {options.block_size} has no fast kernel in ONNX Runtime; choose one of "
                f"{', '.join(map(str, BLOCK_SIZES))}."
            )
        if profile == "default" and config.head_dim % 8:
            raise InputError(
                f"config.json: head_dim {config.head_dim} is not a multiple of 8, which ONNX Runtime's "
                f"GroupQueryAttention needs; pass --profile standard."
            )

    def write(
        self,
        model: FoldedModel,
        config: DecoderConfig,
        options: ExportOptions,
        plan: QuantizationPlan,
        tokenizer_length: int,
        directory: Path,
        progress: Progress = silent,
    ) -> Artifact:
        """Write the graph and its weights, and read them back to check them.

        Raises `InputError` before any work where the backbone's tensors are not those of the config.
        """
        self.check(config, options)
        check_backbone(model, config)
        import onnx_ir as ir

        from pit_export.onnx_decoder import DecoderGraph
        from pit_export.onnx_graph import GraphBuilder

        profile = self._profile(options)
        config = replace(config, vocab_size=model.vocab_size)  # the tables' rows are the truth
        backbone = Backbone(model, config, progress)
        with WeightsFile(directory / WEIGHTS_FILE) as weights:
            graph = GraphBuilder(weights, inline_below=self._inline_below)
            operators = self._operators(profile, graph, config, options.context_length(config))
            decoder = DecoderGraph(graph, operators, config, backbone, plan)
            decoder.build(model.tables, tokenizer_length, last_only=options.logits == "last")
        backbone.check_all_used()
        written = graph.model(model.name, operators.opset)
        ir.save(written, directory / MODEL_FILE)
        check_model_file(directory / MODEL_FILE)
        return Artifact(
            runtime="onnx",
            profile=profile,
            model_file=MODEL_FILE,
            inputs=_values(written.graph.inputs),
            outputs=_values(written.graph.outputs),
            states=_states(written.graph.inputs),
            hidden_states=decoder.hidden_states,
            precision=self._precision(plan, profile),
        )

    def finish(
        self,
        directory: Path,
        config: DecoderConfig,
        *,
        context_length: int,
        bos_id: int | None,
        end_ids: Sequence[int],
    ) -> None:
        """Write `genai_config.json` from the files in `directory`, its `generation_config.json` among them."""
        content = genai_config(
            config,
            context_length=context_length,
            bos_id=bos_id,
            end_ids=end_ids,
            generation_config=read_json_if_there(directory / "generation_config.json"),
            shared_buffer=_updates_in_place(directory / MODEL_FILE),
        )
        write_json(directory / "genai_config.json", content)

    def _profile(self, options: ExportOptions) -> str:
        return options.profile or self.profiles[0]

    def _operators(self, profile: str, graph: GraphBuilder, config: DecoderConfig, context: int) -> Operators:
        from pit_export.onnx_contrib import ContribOperators
        from pit_export.onnx_standard import StandardOperators

        if profile == "standard":
            return StandardOperators(graph, config, context)
        return ContribOperators(graph, config, context, self._accuracy_level)

    def _precision(self, plan: QuantizationPlan, profile: str) -> dict[str, Any]:
        quantized = any(plan.precision(role).startswith("int") for role in ("weights", "tables"))
        level = self._accuracy_level if quantized and profile == "default" else None
        return {
            "weights": plan.weights,
            "tables": plan.tables,
            "activations": "int8" if level == ACCURACY_LEVEL else "fp32",
            "block_size": plan.block_size if quantized else None,
            "symmetric": plan.symmetric if quantized else None,
            "accuracy_level": level,
            "kv_cache": "fp32",
        }


def _updates_in_place(model_path: Path) -> bool:
    """Whether past and present may be one buffer: GroupQueryAttention can, the standard's Attention cannot."""
    model = require("onnx", "onnx").load(model_path, load_external_data=False)
    return any(node.op_type == "GroupQueryAttention" for node in model.graph.node)


def _values(values: Iterable[ir.Value]) -> list[dict[str, Any]]:
    """Inputs or outputs that are no states, in the manifest's terms."""
    return [_describe(v) for v in values if not (v.name or "").startswith((PAST, PRESENT))]


def _states(inputs: Iterable[ir.Value]) -> list[dict[str, Any]]:
    described = [_describe(v) for v in inputs if (v.name or "").startswith(PAST)]
    return [{**state, "output": state["name"].replace(PAST, PRESENT, 1)} for state in described]


def _describe(value: ir.Value) -> dict[str, Any]:
    assert value.shape is not None and value.dtype is not None
    shape = [d if isinstance(d, int) else str(d.value) for d in value.shape]
    return {"name": value.name, "dtype": value.dtype.numpy().name, "shape": shape}
