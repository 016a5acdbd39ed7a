"""What a bundle says of itself: the manifest's body from an export's parts."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from pit_deploy.architecture import DecoderConfig
from pit_deploy.bundle import load_tokenizer, sha256, tokenizer_checks
from pit_deploy.chat import has_chat_template, special_tokens
from pit_deploy.checkpoint import Checkpoint
from pit_deploy.export_options import Artifact, ExportOptions
from pit_deploy.folding import FoldedModel
from pit_deploy.generation_config import checkpoint_bos_id
from pit_deploy.golden import GoldenRecord, versions
from pit_deploy.json_files import read_json_if_there
from pit_deploy.manifest import (
    Architecture,
    CoreMLProgram,
    Golden,
    ManifestBody,
    NestedHeadPart,
    Precision,
    QuantizationSummary,
    Source,
    SourceFile,
    State,
    TensorError,
    TokenizedText,
    Value,
)
from pit_deploy.quantize.plan import QuantizationPlan

_WEIGHT_FILES = ("*.safetensors", "config.json")


def describe(
    checkpoint: Checkpoint,
    model: FoldedModel,
    config: DecoderConfig,
    options: ExportOptions,
    plan: QuantizationPlan,
    artifact: Artifact,
    golden: GoldenRecord,
    *,
    end_ids: list[int],
    tokenizer_length: int,
    context_length: int,
    directory: Path,
) -> ManifestBody:
    """The manifest of a bundle whose files lie in `directory`, without their list (`write_manifest` adds it)."""
    quantization = tuple(TensorError(**error) for error in plan.errors)
    tokenizer = load_tokenizer(directory / "tokenizer.json")
    specials = special_tokens(read_json_if_there(directory / "tokenizer_config.json"))
    return ManifestBody(
        created_by=versions(),
        source=_source(checkpoint),
        folds=tuple(model.folds),
        layout=model.layout,  # type: ignore[arg-type]  # checked by check_layout
        runtime=artifact.runtime,  # type: ignore[arg-type]  # the exporter's constant, validated by pydantic
        profile=artifact.profile,
        model_file=artifact.model_file,
        precision=Precision(**artifact.precision),
        architecture=Architecture(
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
        ),
        inputs=tuple(Value(**v) for v in artifact.inputs),
        outputs=tuple(Value(**v) for v in artifact.outputs),
        states=tuple(State(**s) for s in artifact.states),
        hidden_states=tuple(artifact.hidden_states),
        logits=options.logits,  # type: ignore[arg-type]  # checked by ExportOptions
        vocab_size=config.vocab_size,
        tokenizer_length=tokenizer_length,
        context_length=context_length,
        bos_id=checkpoint_bos_id(checkpoint),
        end_ids=tuple(end_ids),
        chat_template=has_chat_template(directory),
        quantization=quantization,
        quantization_summary=QuantizationSummary.of(quantization),
        tokenizer_checks=tuple(tokenizer_checks(tokenizer, list(specials.values()))),
        coreml=None if artifact.coreml is None else CoreMLProgram(**artifact.coreml),
        golden=Golden(
            file="golden.safetensors",
            positions=golden.positions,
            prompts=tuple(TokenizedText(text=p.text, ids=tuple(p.ids)) for p in golden.prompts),
        ),
        nested_head=None if plan.nested is None else NestedHeadPart(**asdict(plan.nested)),
    )


def _source(checkpoint: Checkpoint) -> Source:
    files = sorted({p for pattern in _WEIGHT_FILES for p in checkpoint.path.glob(pattern)})
    return Source(
        name=checkpoint.name.replace("/", "--"),
        model_type=checkpoint.model_type,
        kind=checkpoint.kind,  # type: ignore[arg-type]  # one of the three words
        files=tuple(SourceFile(name=f.name, size=f.stat().st_size, sha256=sha256(f)) for f in files),
        license=_license(checkpoint.path),
    )


def _license(directory: Path) -> str | None:
    """The licence id of the model card's front matter."""
    with suppress(OSError, UnicodeDecodeError):
        text = (directory / "README.md").read_text(encoding="utf-8")
        front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
        found = re.search(r"^license:\s*['\"]?([\w.+-]+)", front.group(1), re.MULTILINE) if front else None
        return found.group(1) if found else None
    return None
