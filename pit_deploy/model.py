"""`PITForCausalLM`: any decoder-only model of transformers whose two token tables are one `PITInterface`.

The library's own CausalLM class runs the backbone, soft caps, scales and loss; only its embedding and its head
are exchanged, so that nothing of an architecture is written twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pit_deploy.checkpoint import Checkpoint, open_checkpoint, read_json, write_json, write_safetensors
from pit_deploy.errors import InputError
from pit_deploy.files import atomic_output
from pit_deploy.folding import copy_companions
from pit_deploy.initialize import orthonormality_error, reorthonormalize
from pit_deploy.interface import PITInterface

PIT_VERSION = 1
MODEL_TYPE = "pit"
_ORTHONORMALITY_LIMIT = 1e-5
"""A memory further from orthonormal than this (a save in bf16, a long training) is re-orthonormalised on load."""


class PITEmbedding(nn.Module):
    """The input end. `scale` is the factor that the architecture's own embedding module applies (Gemma)."""

    def __init__(self, interface: PITInterface, dtype: torch.dtype, scale: torch.Tensor | None) -> None:
        super().__init__()
        self.__dict__["interface"] = interface  # a plain reference: the model owns its parameters
        self.output_dtype = dtype
        self.scale: torch.Tensor | None
        self.register_buffer("scale", scale, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The memory `Z`: what generic code may ask for its shape, dtype and device."""
        return self.__dict__["interface"].memory

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.__dict__["interface"].embed(input_ids).to(self.output_dtype)
        return x if self.scale is None else x * self.scale.to(self.output_dtype)


class PITHead(nn.Module):
    """The output end."""

    def __init__(self, interface: PITInterface) -> None:
        super().__init__()
        self.__dict__["interface"] = interface
        self.bias = None

    @property
    def weight(self) -> torch.Tensor:
        return self.__dict__["interface"].memory

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.__dict__["interface"].logits(hidden_states)
        return logits


class PITForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model with a PIT interface.

    `backbone` is the library's CausalLM model, whose embedding and head are replaced in place; `pit` is the
    interface; `config` is the backbone's own config. `save_pretrained` and `from_pretrained` use the PIT
    checkpoint format (docs/checkpoints.md).
    """

    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    supports_gradient_checkpointing = True

    def __init__(self, backbone: PreTrainedModel, interface: PITInterface) -> None:
        super().__init__(backbone.config)
        dtype = backbone.dtype
        scale = getattr(backbone.get_input_embeddings(), "embed_scale", None)
        if scale is not None:
            scale = torch.as_tensor(scale).detach().clone()
        self.backbone = backbone
        self.pit = interface
        backbone.set_input_embeddings(PITEmbedding(interface, dtype, scale))
        backbone.set_output_embeddings(PITHead(interface))
        self.config.tie_word_embeddings = False
        self.config.vocab_size = interface.memory.shape[0]
        self.generation_config = backbone.generation_config or GenerationConfig()

    @property
    def decoder(self) -> nn.Module:
        """The stack of layers inside the backbone, without embedding and head."""
        return getattr(self.backbone, self.backbone.base_model_prefix)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.backbone.get_output_embeddings()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """As the backbone's own forward: `input_ids` [batch, tokens] to `logits` [batch, tokens, V]."""
        return self.backbone(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        overwrite: bool = True,
        companions: str | Path | None = None,
        **ignored: Any,
    ) -> None:  # type: ignore[override]
        """Write a PIT checkpoint. `companions` is a directory whose tokenizer, licence and card are carried along.

        The directory is replaced as a whole when everything is written; a failure leaves what was there.
        """
        backbone = {name: tensor for name, tensor in self.backbone.state_dict().items()}
        with atomic_output(save_directory, overwrite=overwrite) as partial:
            write_safetensors(partial, [*backbone.items(), *interface_tensors(self.pit)])
            config = pit_config(
                self.config.to_dict(),
                self.pit.memory_kind,
                self.pit.bridge_kind,
                [type(self.backbone).__name__],
            )
            write_json(partial / "config.json", config)
            if companions is not None:
                copy_companions(Path(companions), partial)
            if not (partial / "generation_config.json").exists():
                self.generation_config.save_pretrained(partial)

    @classmethod
    def from_pretrained(
        cls, source: str | Path | Checkpoint, *, dtype: torch.dtype | None = None, **ignored: Any
    ) -> PITForCausalLM:  # type: ignore[override]
        """Load a PIT checkpoint. `dtype` is the backbone's (None: as stored); the interface is float32 always.

        Raises `InputError` for missing or unexpected tensors, all named at once.
        """
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        if checkpoint.kind != "pit":
            raise InputError(f"{checkpoint.path} is not a PIT checkpoint; run pit-deploy convert first.")
        backbone = build_backbone(
            checkpoint.backbone_config, checkpoint.table_rows, dtype or _stored_dtype(checkpoint)
        )
        model = cls(backbone, load_interface(checkpoint))
        _load_backbone(backbone, checkpoint)
        if (checkpoint.path / "generation_config.json").is_file():
            read_json(checkpoint.path / "generation_config.json")  # our sentence rather than a traceback
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
        return model.eval()


def build_backbone(config: dict[str, Any], rows: int, dtype: torch.dtype) -> PreTrainedModel:
    """The library's CausalLM model of this config, without meaningful weights."""
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"config.json: transformers has no causal language model of model_type '{model_type}'."
        )
    own = CONFIG_MAPPING[model_type].from_dict({**config, "vocab_size": rows, "tie_word_embeddings": False})
    with no_init_weights(), quiet():
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(own, dtype=dtype)
    return model


def load_interface(checkpoint: Checkpoint) -> PITInterface:
    """The interface of a PIT checkpoint, its memory re-orthonormalised where it has drifted (with a note)."""
    memory, cholesky = checkpoint.read("pit.memory"), checkpoint.read("pit.cholesky")
    error = orthonormality_error(memory)
    if error > _ORTHONORMALITY_LIMIT:
        memory = reorthonormalize(memory)
        checkpoint.note(
            f"pit.memory was {error:.2g} away from orthonormal columns and was re-orthonormalised to "
            f"{orthonormality_error(memory):.2g}"
        )
    bridge: torch.Tensor | None = None
    for key in ("pit.bridge", "pit.embedding_multiplier"):
        if key in checkpoint.tensors:
            bridge = torch.from_numpy(checkpoint.read(key))
    return PITInterface(
        torch.from_numpy(memory),
        torch.from_numpy(cholesky),
        bridge,
        memory_kind=checkpoint.config["pit"].get("memory", "frozen"),
    )


def interface_tensors(interface: PITInterface) -> list[tuple[str, torch.Tensor]]:
    """The interface in the terms of the checkpoint format: `L` itself, so that no parametrisation is implied."""
    tensors = [("pit.memory", interface.memory.detach()), ("pit.cholesky", interface.cholesky.detach())]
    if interface.bridge is not None:
        tensors.append(("pit.bridge", interface.bridge.detach()))
    if interface.embedding_multiplier is not None:
        tensors.append(("pit.embedding_multiplier", interface.embedding_multiplier))
    return tensors


def pit_config(
    config: dict[str, Any], memory: str, bridge: str, architectures: list[str] | None
) -> dict[str, Any]:
    """config.json of a PIT checkpoint, from the backbone's."""
    own = {
        "version": PIT_VERSION,
        "backbone_model_type": config["model_type"],
        "backbone_architectures": architectures,
        "memory": memory,
        "bridge": bridge,
    }
    return {
        **config,
        "model_type": MODEL_TYPE,
        "architectures": ["PITForCausalLM"],
        "tie_word_embeddings": False,
        "pit": own,
    }


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' own bars and remarks; what matters is reported by pit-deploy."""
    logging = transformers.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _load_backbone(backbone: PreTrainedModel, checkpoint: Checkpoint) -> None:
    wanted = backbone.state_dict()
    stored = {
        name
        for name in checkpoint.tensors
        if not name.startswith("pit.") and not name.endswith("rotary_emb.inv_freq")
    }
    problems = [
        f"{kind} {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for kind, names in (
            ("missing:", sorted(set(wanted) - stored)),
            ("unexpected:", sorted(stored - set(wanted))),
        )
        if names
    ]
    if problems:
        raise InputError(f"{checkpoint.path} does not fit its config: {'; '.join(problems)}.")
    with torch.no_grad():
        for name, target in wanted.items():
            value = checkpoint.read_torch(name)
            if value.shape != target.shape:
                raise InputError(
                    f"{checkpoint.path}: {name} has shape {list(value.shape)}, its config asks for {list(target.shape)}."
                )
            target.copy_(value)


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    kinds = {info.dtype for name, info in checkpoint.tensors.items() if not name.startswith("pit.")}
    known = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    return known[next(iter(kinds))] if len(kinds) == 1 and kinds <= set(known) else torch.float32
