"""Export to ONNX: one graph, one file of weights, and what onnxruntime-genai reads beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pit_deploy.architecture import DecoderConfig
from pit_deploy.checkpoint import write_json
from pit_deploy.errors import InputError
from pit_deploy.export_options import Artifact, ExportOptions
from pit_deploy.extras import require
from pit_deploy.folding import FoldedModel
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.plan import QuantizationPlan
from pit_export.backbone import Backbone, check_backbone
from pit_export.genai_config import genai_config
from pit_export.onnx_weights import WeightsFile, check_model_file

if TYPE_CHECKING:
    from pit_export.onnx_graph import GraphBuilder
    from pit_export.onnx_operators import Operators

MODEL_FILE, WEIGHTS_FILE = "model.onnx", "model.onnx_data"
ACCURACY_LEVEL = 4
"""MatMulNBits multiplies by activations rounded to int8 (dynamically, by block): three times the speed of float."""
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
    profiles = ("default", "standard")

    def __init__(self, *, accuracy_level: int = ACCURACY_LEVEL, inline_below: int = 1024) -> None:
        self._accuracy_level, self._inline_below = accuracy_level, inline_below

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
            hidden_states=decoder.hidden_states,
            precision=self._precision(plan, profile),
            **_interface(written.graph.inputs, written.graph.outputs),
        )

    def finish(
        self,
        directory: Path,
        config: DecoderConfig,
        context_length: int,
        bos_id: int | None,
        end_ids: Sequence[int],
        generation_config: Mapping[str, Any] | None = None,
        *,
        profile: str = "default",
    ) -> None:
        """Write `genai_config.json`, once the tokenizer's files are in `directory`."""
        pad_id = (generation_config or {}).get("pad_token_id")
        content = genai_config(
            config,
            context_length=context_length,
            bos_id=bos_id,
            end_ids=end_ids,
            pad_id=pad_id,
            generation_config=generation_config,
            shared_buffer=profile == "default",
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


def _interface(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[str, list[dict[str, Any]]]:
    """Inputs, outputs and states of a graph in the manifest's terms, in the graph's order."""
    described = {value.name: _describe(value) for value in [*inputs, *outputs]}
    states = []
    for value in inputs:
        if value.name.startswith("past_key_values."):
            output = value.name.replace("past_key_values.", "present.", 1)
            states.append({**described[value.name], "output": output})
    taken = {state[key] for state in states for key in ("name", "output")}
    return {
        "inputs": [described[v.name] for v in inputs if v.name not in taken],
        "outputs": [described[v.name] for v in outputs if v.name not in taken],
        "states": states,
    }


def _describe(value: Any) -> dict[str, Any]:
    shape = [d if isinstance(d, int) else str(d.value) for d in value.shape]
    return {"name": value.name, "dtype": value.dtype.numpy().name, "shape": shape}
