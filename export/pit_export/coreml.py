"""Export to Core ML: an ML Program with one function for prompts and one for single tokens.

Profiles: `cpu_gpu` and `neural_engine` keep keys and values in states (iOS 18), `stateless` passes them in and out
(iOS 17). docs/coreml.md describes the packages.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pit_deploy.architecture import DecoderConfig
from pit_deploy.export_options import Artifact, ExportOptions
from pit_deploy.extras import require
from pit_deploy.folding import FoldedModel
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.plan import Encoder, QuantizationPlan
from pit_export.backbone import Backbone, check_backbone
from pit_export.coreml_profiles import CACHE_MULTIPLE, HEAD_ROWS, PREFILL_TOKENS, PROFILES, Profile

if TYPE_CHECKING:
    from pit_export.coreml_checks import Place
    from pit_export.coreml_decoder import DecoderGraph

MODEL_FILE, PREFILL_FILE = "model.mlpackage", "prefill.mlpackage"
PREFILL, DECODE = "prefill", "decode"
MAIN = "main"
"""Name of the function of a package that has one: iOS 17 knows no other."""


class CoreMLExporter:
    """Writes `model.mlpackage`, and `prefill.mlpackage` beside it where one package cannot hold two functions."""

    name = "coreml"
    extra = "coreml"
    default_layout = "untied"
    default_precision = "int8"
    writes_bundle = True
    profiles = tuple(PROFILES)

    def grids(self, options: ExportOptions) -> Mapping[int, QuantizationOptions]:
        """iOS 17 has one scale a row. Palettes serve whole rows too: outliers are best spread over all of a row."""
        forms = _profile(options).forms
        by_row = {8: QuantizationOptions(8, None)}
        if forms == "palettes":
            return by_row | {4: QuantizationOptions(4, options.block_size)}
        return by_row if forms == "channels" else {}

    def encoder(self, options: ExportOptions) -> Encoder | None:
        """Palettes of 4, 6 or 8 bits for the Neural Engine."""
        if _profile(options).forms != "palettes":
            return None
        from pit_deploy.runtimes.mil_program import quiet_coremltools

        quiet_coremltools()
        from pit_export.coreml_weights import PALETTE_BITS, encode_palette

        return Encoder(PALETTE_BITS, encode_palette)

    def check(self, config: DecoderConfig, options: ExportOptions) -> None:
        """Raise `InputError` for options that the profile cannot build."""
        require("torch", self.extra)
        _profile(options).check(config, options)
        options.context_length(config)

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
        """Write the packages, open them again from disk and check what they compute (`coreml_checks`).

        Raises `InputError` before any work where the backbone's tensors are not those of the config, and
        `ParityError` where a check fails.
        """
        self.check(config, options)
        check_backbone(model, config)
        from pit_deploy.runtimes.mil_program import quiet_coremltools

        quiet_coremltools()
        from pit_export.coreml_checks import check_packages
        from pit_export.coreml_description import describe, part_sizes

        config = replace(config, vocab_size=model.vocab_size)  # the tables' rows are the truth
        profile, context = _profile(options), options.context_length(config)
        length = profile.cache_length(context)
        backbone = Backbone(model, config, progress)
        decoder = _decoder(model, config, options, plan, tokenizer_length, backbone)
        places = _save(decoder, profile, length, directory)
        backbone.check_all_used()
        sizes, names = part_sizes(decoder.graph.stored), decoder.hidden_states
        del decoder
        gc.collect()  # programs of coremltools are rings of references, and hold the weights
        functions = check_packages(directory, places, names, tokenizer_length)
        description = describe(places, functions, profile, config, sizes, profile.dtype(options))
        notes = []
        if length != context:
            notes.append(
                f"the cache has room for {length} tokens instead of {context}: the Neural Engine wants a multiple of "
                f"{CACHE_MULTIPLE}"
            )
        return Artifact(
            runtime="coreml",
            profile=profile.name,
            model_file=MODEL_FILE,
            inputs=description.inputs,
            outputs=description.outputs,
            states=description.states,
            hidden_states=names,
            precision=_precision(plan, profile, options),
            notes=notes,
            coreml=description.coreml,
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
        """Nothing: Core ML reads no more than the packages."""


def _profile(options: ExportOptions) -> Profile:
    return PROFILES[options.profile or next(iter(PROFILES))]


def _decoder(
    model: FoldedModel,
    config: DecoderConfig,
    options: ExportOptions,
    plan: QuantizationPlan,
    tokenizer_length: int,
    backbone: Backbone,
) -> DecoderGraph:
    """The decoder in the profile's form, without a function yet."""
    from pit_export.coreml_cache import PassedCache, StateCache
    from pit_export.coreml_decoder import DecoderGraph, DecoderSpec
    from pit_export.coreml_graph import GraphBuilder
    from pit_export.coreml_layouts import ChannelMajor, TokenMajor
    from pit_export.coreml_weights import BlockForm, ChannelForm, Form, PaletteForm

    profile = _profile(options)
    graph = GraphBuilder(profile.target, profile.dtype(options))
    length = profile.cache_length(options.context_length(config))
    cache = (StateCache if profile.stateful else PassedCache)(graph, config, length)
    layout = (ChannelMajor if profile.channel_major else TokenMajor)(graph)
    forms: dict[str, Callable[[QuantizationPlan, type], Form]] = {
        "blocks": BlockForm,
        "palettes": PaletteForm,
        "channels": ChannelForm,
    }
    form = forms[profile.forms](plan, graph.float_type)
    spec = DecoderSpec(
        config,
        tokenizer_length,
        last_only=options.logits == "last",
        head_rows=HEAD_ROWS if profile.channel_major else config.vocab_size,
        fused_attention=profile.name == "cpu_gpu",
    )
    return DecoderGraph(graph, layout, cache, spec, backbone, form, model.tables)


def _save(decoder: DecoderGraph, profile: Profile, length: int, directory: Path) -> list[Place]:
    """Write the functions: into one package, or one each where the system has no packages of several."""
    from pit_export.coreml_checks import Place

    functions = {PREFILL: min(PREFILL_TOKENS, length), DECODE: 1} if length > 1 else {DECODE: 1}
    if profile.stateful:
        for name, tokens in functions.items():
            decoder.add_function(name, tokens)
        decoder.graph.save(directory / MODEL_FILE, DECODE)
        return [Place(name, MODEL_FILE, name, tokens) for name, tokens in functions.items()]
    places = []
    for name, tokens in functions.items():
        file = PREFILL_FILE if name == PREFILL else MODEL_FILE
        decoder.graph.begin_program()
        decoder.add_function(MAIN, tokens)
        decoder.graph.save(directory / file, MAIN)
        places.append(Place(name, file, MAIN, tokens))
    return places


def _precision(plan: QuantizationPlan, profile: Profile, options: ExportOptions) -> dict[str, Any]:
    quantized = any(precision.startswith("int") for precision in (plan.weights, plan.tables))
    blocks = quantized and profile.forms == "blocks"
    return {
        "weights": plan.weights,
        "tables": plan.tables,
        "activations": profile.dtype(options),
        "block_size": plan.block_size if blocks else None,
        "symmetric": (profile.forms == "channels" or (blocks and plan.symmetric)) if quantized else None,
        "accuracy_level": None,
        "kv_cache": profile.dtype(options),
    }
