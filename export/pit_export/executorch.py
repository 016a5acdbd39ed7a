"""Export to ExecuTorch: one .pte with a KV cache, for ExecuTorch's own runners and for ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pit_deploy.architecture import DecoderConfig
from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.export_options import Artifact, ExportOptions
from pit_deploy.extras import require
from pit_deploy.folding import FoldedModel
from pit_deploy.generation_config import checkpoint_bos_id, checkpoint_end_ids
from pit_deploy.json_files import read_json_if_there
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.plan import QuantizationPlan
from pit_deploy.runtimes.executorch_package import import_executorch, without_output
from pit_export.backbone import Backbone, check_backbone

MODEL_FILE = "model.pte"
PROFILES = ("xnnpack", "portable", "coreml", "vulkan", "mps")
PRECISIONS = ("fp32", "int8", "int4")
BLOCKS = 32
"""XNNPACK's blocks of 4-bit weights are multiples of it."""


class ExecutorchExporter:
    """Writes `model.pte`: `forward(tokens int64 [1, S], input_pos int64 [1])` with a free S gives logits.

    Profile `xnnpack` has XNNPACK's delegates and the operators of ExecuTorch's LLM extension; `portable` needs
    XNNPACK and portable kernels alone; `coreml`, `vulkan` and `mps` lower to those delegates what they take (`mps`
    with S fixed to 1).
    `shared` False lowers every delegate on its own (see `executorch_lowering.lower`).
    """

    name = "executorch"
    extra = "executorch"
    default_layout = "untied"
    default_precision = "int8"
    writes_bundle = True
    profiles = PROFILES

    def __init__(self, *, shared: bool = True) -> None:
        self._shared = shared

    def grids(self, options: ExportOptions) -> Mapping[int, QuantizationOptions]:
        """XNNPACK takes 8-bit weights by channel and 4-bit ones by block, both with positive scales."""
        return {
            8: QuantizationOptions(8, None, positive_scales=True),
            4: QuantizationOptions(4, options.block_size, positive_scales=True),
        }

    def encoder(self, options: ExportOptions) -> None:
        """The quantiser's codes are stored as they are."""

    def check(self, config: DecoderConfig, options: ExportOptions) -> None:
        """Raise for a missing or mismatched package, and `InputError` for what the backends do not take."""
        import_executorch("executorch.exir")
        with without_output():
            for package in ("torchao", "pytorch_tokenizers"):
                require(package, self.extra)
        profile = options.profile or self.profiles[0]
        if profile not in PROFILES:
            raise InputError(
                f"--profile {profile} is not known to executorch; choose one of {', '.join(PROFILES)}."
            )
        if profile == "coreml":
            with without_output():
                require("coremltools", "coreml")
        options.context_length(config)
        if config.attention_softcap is not None and profile == "xnnpack":
            raise InputError(
                f"config.json: attn_logit_softcapping is {config.attention_softcap:g}, and ExecuTorch's attention "
                f"operator has no soft cap; pass --profile portable."
            )
        if options.layout == "shared":
            raise InputError(
                "--layout shared cannot be written for executorch: its kernels on x86 and in delegates need a table "
                "of their own for the head; leave --layout out."
            )
        asked = (options.weights or self.default_precision, options.tables or self.default_precision)
        for name, precision in zip(("weights", "tables"), asked, strict=True):
            if precision not in PRECISIONS:
                raise InputError(
                    f"--{name} {precision} is not built for executorch; choose one of {', '.join(PRECISIONS)}."
                )
        self._check_quantization(config, options, profile, asked)

    def _check_quantization(
        self, config: DecoderConfig, options: ExportOptions, profile: str, asked: tuple[str, str]
    ) -> None:
        if profile not in ("xnnpack", "portable") and asked != ("fp32", "fp32"):
            raise InputError(
                f"--profile {profile} is built for float weights; pass --weights fp32, or --profile xnnpack."
            )
        if options.symmetric is False:
            raise InputError("--zero-points cannot be written for executorch: XNNPACK takes symmetric codes.")
        if "int4" not in asked and not options.searches:
            return
        if options.block_size % BLOCKS:
            raise InputError(
                f"--block-size {options.block_size} is not a multiple of {BLOCKS}, which XNNPACK's 4-bit kernels "
                f"need; choose 32, 64 or 128."
            )
        sizes = {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads * head_dim": config.query_size,
        }
        for field, size in sizes.items():
            if size % options.block_size:
                raise InputError(
                    f"config.json: {field} {size} is not a multiple of --block-size {options.block_size}, which "
                    f"XNNPACK's 4-bit kernels need; pass --weights int8."
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
        """Write the program. Raises `InputError` before any work where tensors are not those of the config."""
        self.check(config, options)
        check_backbone(model, config)
        from pit_deploy.decoder import build_decoder, load_weights
        from pit_export import executorch_lowering as lowering
        from pit_export.executorch_pieces import QuantizedStore

        name = options.profile or self.profiles[0]
        profile = lowering.PROFILES[name]
        lowering.import_operators(profile)
        context = options.context_length(config)
        config = replace(config, vocab_size=model.vocab_size)  # the tables' rows are the truth
        backbone = Backbone(model, config, progress)
        last_only = options.logits == "last"
        decoder = build_decoder(
            config,
            context,
            profile.pieces,
            tables=model.tables,
            tokenizer_length=tokenizer_length,
            last_only=last_only,
        )
        load_weights(decoder, config, backbone.read, model.tables, QuantizedStore(plan))
        backbone.check_all_used()
        metadata = runner_metadata(
            config,
            context,
            bos_id=checkpoint_bos_id(model.source),
            end_ids=checkpoint_end_ids(model.source),
            custom_operators=profile.custom_operators,
            free_length=profile.free_length,
        )
        length = "sequence_length" if profile.free_length else 1
        progress("lower", 0, 1)
        lowered = lowering.lower(
            decoder,
            profile,
            metadata,
            directory / MODEL_FILE,
            shared=self._shared,
        )
        progress("lower", 1, 1)
        return Artifact(
            runtime="executorch",
            profile=name,
            model_file=MODEL_FILE,
            inputs=[
                {"name": "tokens", "dtype": "int64", "shape": [1, length]},
                {"name": "input_pos", "dtype": "int64", "shape": [1]},
            ],
            outputs=_outputs(config, last_only, length),
            states=[],  # the program keeps its cache itself
            hidden_states=[] if last_only else hidden_state_names(config),
            precision=_precision(plan, name),
            notes=[*_notes(name, lowered), *_tokenizer_notes(model.source.path)],
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
        """Open the program as a runner does. Raises `PitDeployError` where it says something else of itself."""
        from pit_deploy.runtimes.executorch import program_metadata

        found = program_metadata(directory / MODEL_FILE)
        expected = {
            "get_max_context_len": context_length,
            "get_eos_ids": list(end_ids),
            "get_vocab_size": config.vocab_size,
        }
        if bos_id is not None:
            expected["get_bos_id"] = bos_id
        for name, value in expected.items():
            if found.get(name) != value:
                raise PitDeployError(
                    f"{MODEL_FILE} says {name} {found.get(name)}, and the bundle {value}; this is an error of the "
                    f"exporter."
                )


def runner_metadata(
    config: DecoderConfig,
    context_length: int,
    *,
    bos_id: int | None,
    end_ids: Sequence[int],
    custom_operators: bool,
    free_length: bool,
) -> dict[str, Any]:
    """What ExecuTorch's runners ask a program for, by the names that they use; nothing is made up."""
    metadata: dict[str, Any] = {
        "get_max_seq_len": context_length,
        "get_max_context_len": context_length,
        "get_vocab_size": config.vocab_size,
        "get_eos_ids": list(end_ids),
        "get_n_layers": config.num_hidden_layers,
        "use_kv_cache": True,
        "use_sdpa_with_kv_cache": custom_operators,
        "enable_dynamic_shape": free_length,
    }
    if bos_id is not None:
        metadata["get_bos_id"] = bos_id
    return metadata


def hidden_state_names(config: DecoderConfig) -> list[str]:
    """The rows of the second output of a program with all logits."""
    return [f"hidden_states.{n}" for n in range(config.num_hidden_layers + 1)]


def _outputs(config: DecoderConfig, last_only: bool, length: int | str) -> list[dict[str, Any]]:
    rows = 1 if last_only else length
    logits = {"name": "logits", "dtype": "float32", "shape": [1, rows, config.vocab_size]}
    if last_only:
        return [logits]
    stream = [config.num_hidden_layers + 1, length, config.hidden_size]
    return [logits, {"name": "hidden_states", "dtype": "float32", "shape": stream}]


def _precision(plan: QuantizationPlan, profile: str) -> dict[str, Any]:
    quantized = [role for role in ("weights", "tables") if plan.precision(role).startswith("int")]
    blocks = plan.options(4).block_size if "int4" in (plan.weights, plan.tables) else None
    return {
        "weights": plan.weights,
        "tables": plan.tables,
        "activations": "int8" if quantized else "fp32",
        "block_size": blocks,
        "symmetric": True if quantized else None,
        "accuracy_level": None,
        "kv_cache": "fp32",
    }


def _notes(profile: str, lowered: Any) -> list[str]:
    """What no delegate took; little of the usual profile, and known."""
    if profile == "xnnpack":
        return []
    left = ", ".join(f"{name} ({count})" for name, count in lowered.leftover.items())
    return [f"{profile}: {lowered.delegates} delegates; operators left to portable kernels: {left or 'none'}"]


def _tokenizer_notes(directory: Path) -> list[str]:
    """What the stock runner makes of the tokenizer, where that is not what the model was trained with."""
    from pit_deploy.bundle import load_tokenizer, tokenizer_checks
    from pit_deploy.chat import special_tokens
    from pit_deploy.runtimes.executorch_text import tokenizer_problem

    file = directory / "tokenizer.json"
    if not file.is_file():
        return []
    specials = special_tokens(read_json_if_there(directory / "tokenizer_config.json"))
    checks = tokenizer_checks(load_tokenizer(file), list(specials.values()))
    problem = tokenizer_problem(directory, [check.text for check in checks])
    if problem is None:
        return []
    return [f"{problem}: its stock runners cannot be used with this bundle, runtimes that are given ids can"]
