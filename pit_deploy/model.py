"""`PITForCausalLM`: any decoder-only model of transformers whose two token tables are one `PITInterface`.

The library's own CausalLM class runs the backbone, soft caps, scales and loss; only its embedding and its
head are exchanged, so that nothing of an architecture is written twice.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pit_deploy.architecture import check_runnable, refuse_misfits
from pit_deploy.architecture import embedding_scale as trained_embedding_scale
from pit_deploy.architecture import quiet as quiet
from pit_deploy.checkpoint import (
    EMBEDDING_KEYS,
    HEAD_KEYS,
    OWN_VERSION,
    Checkpoint,
    backbone_shapes,
    open_checkpoint,
)
from pit_deploy.errors import InputError
from pit_deploy.files import atomic_output, check_output
from pit_deploy.folding import copy_companions
from pit_deploy.initialize import read_interface
from pit_deploy.interface import PITInterface, raw_to_cholesky
from pit_deploy.json_files import read_json, write_json
from pit_deploy.weight_files import write_safetensors

MODEL_TYPE = "pit"


class PITEmbedding(nn.Module):
    """The input end. `scale` is the factor that the architecture's own embedding module applies (Gemma)."""

    scale: torch.Tensor | None
    like_backbone: torch.Tensor

    def __init__(self, interface: PITInterface, dtype: torch.dtype, scale: torch.Tensor | None) -> None:
        super().__init__()
        self.__dict__["interface"] = interface  # a plain reference: the model owns its parameters
        self.register_buffer("scale", scale, persistent=False)
        # An empty tensor that is cast along with the backbone: its dtype is that of the embedding's output.
        self.register_buffer("like_backbone", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """The memory `Z`: what generic code may ask for its shape and device."""
        memory: torch.Tensor = self.__dict__["interface"].memory
        return memory

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.__dict__["interface"].embed(input_ids).to(self.like_backbone.dtype)
        return x if self.scale is None else x * self.scale.to(x.dtype)


class PITHead(nn.Module):
    """The output end."""

    def __init__(self, interface: PITInterface) -> None:
        super().__init__()
        self.__dict__["interface"] = interface
        self.bias = None

    @property
    def weight(self) -> torch.Tensor:
        memory: torch.Tensor = self.__dict__["interface"].memory
        return memory

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
        dtype, scale = backbone.dtype, embedding_scale(backbone)
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
        decoder: nn.Module = getattr(self.backbone, self.backbone.base_model_prefix)
        return decoder

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

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Refused: rows without orthonormal columns would break the interface."""
        raise InputError(
            "a PIT memory cannot be resized; resize the plain checkpoint's table and convert it again."
        )

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        *,
        overwrite: bool = True,
        companions: str | Path | None = None,
        **other: Any,
    ) -> None:
        """Write a PIT checkpoint. `companions` is a directory whose tokenizer, licence and card are carried.

        The weights are complete before any name changes; a failure leaves what was there. As in transformers,
        other files of an existing directory stay (a trainer keeps its own there). `state_dict` replaces the
        model's own, with the same keys. Raises `InputError` for options of transformers that have no meaning here.
        """
        asked = sorted(k for k, v in other.items() if v and k not in ("safe_serialization", "token"))
        if asked:
            raise InputError(f"save_pretrained of a PIT model does not take {', '.join(asked)}.")
        if not is_main_process:
            return
        directory = Path(save_directory)
        if not overwrite or directory.is_file():
            check_output(directory)
        state = self.state_dict() if state_dict is None else state_dict
        staged = directory / ".pit-deploy" if directory.is_dir() else directory
        with atomic_output(staged, overwrite=True) as partial:
            tensors = [(k.removeprefix("backbone."), v) for k, v in state.items() if not k.startswith("pit.")]
            write_safetensors(partial, [*tensors, *interface_tensors(state)])
            kinds = self.pit.memory_kind, self.pit.bridge_kind
            config = pit_config(self.config.to_dict(), *kinds, [type(self.backbone).__name__])
            write_json(partial / "config.json", config)
            if companions is not None:
                copy_companions(Path(companions), partial)
            if not (partial / "generation_config.json").exists():
                self.generation_config.to_json_file(partial / "generation_config.json")
        if staged != directory:
            _move_files(staged, directory)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, source: str | Path | Checkpoint, *, dtype: torch.dtype | None = None
    ) -> PITForCausalLM:
        """Load a PIT checkpoint. `dtype` is the backbone's (None: as stored); the interface is always float32.

        Raises `InputError` for missing or unexpected tensors, all named at once.
        """
        checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
        if checkpoint.kind != "pit":
            raise InputError(f"{checkpoint.label} is not a PIT checkpoint; run pit-deploy convert first.")
        dtype = dtype or stored_dtype(checkpoint)
        backbone = build_backbone(checkpoint.backbone_config, checkpoint.table_rows, dtype)
        model = cls(backbone, load_interface(checkpoint))
        _load_backbone(backbone, checkpoint)
        if (checkpoint.path / "generation_config.json").is_file():
            read_json(checkpoint.path / "generation_config.json")  # our sentence rather than a traceback
            model.generation_config = GenerationConfig.from_pretrained(checkpoint.path)
        return model.eval()


def backbone_config(config: dict[str, Any], **changes: Any) -> transformers.PretrainedConfig:
    """The library's config object of an untied causal model. Raises `InputError` where it has none."""
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"config.json: transformers has no causal language model of model_type '{model_type}'."
        )
    own = copy.deepcopy(config)  # transformers writes into what it is given
    try:
        with quiet():
            found: transformers.PretrainedConfig = CONFIG_MAPPING[model_type].from_dict(
                {**own, **changes, "tie_word_embeddings": False}
            )
    except Exception as error:  # transformers raises many kinds; each is about the user's config
        reason = " ".join(str(error).split())
        raise InputError(f"config.json: transformers refuses this config: {reason}") from error
    check_runnable(found.to_dict())
    return found


def build_backbone(
    config: dict[str, Any], rows: int, dtype: torch.dtype, *, initialize: bool = False
) -> PreTrainedModel:
    """The library's CausalLM model of this config, without meaningful weights unless `initialize`.

    Raises `InputError` where the library cannot build it.
    """
    own = backbone_config(config, vocab_size=rows)
    try:
        with contextlib.nullcontext() if initialize else no_init_weights(), quiet():
            model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(own, dtype=dtype)
    except Exception as error:  # a size or a word that only the model's own code trips over
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"config.json: transformers cannot build this model: {reason[:300]}") from error
    set_embedding_scale_(model, config)
    return model


def check_fits(checkpoint: Checkpoint, rows: int | None = None, skip: Collection[str | None] = ()) -> None:
    """Compare the headers with what the library would build, without room for a single weight.

    Left out are the tensors in `skip` and the token tables, of `rows` rows (None: as the checkpoint's). Raises
    `InputError` that lists what is missing, surplus or of another shape.
    """
    rows = checkpoint.table_rows if rows is None else rows
    with torch.device("meta"):
        backbone = build_backbone(checkpoint.backbone_config, rows, torch.float32)
    tables = {*EMBEDDING_KEYS, *HEAD_KEYS}
    wanted = {n: tuple(t.shape) for n, t in backbone.state_dict().items() if n not in tables}
    found = {
        name: shape
        for name, shape in backbone_shapes(checkpoint).items()
        if name not in skip and not name.endswith("rotary_emb.inv_freq")
    }
    refuse_misfits(wanted, found, checkpoint.label, checkpoint.model_type)


def embedding_scale(backbone: PreTrainedModel) -> torch.Tensor | None:
    """The factor that the architecture's own embedding module applies, as the number it uses."""
    scale = getattr(backbone.get_input_embeddings(), "embed_scale", None)
    return None if scale is None else torch.as_tensor(scale).detach().clone()


def set_embedding_scale_(backbone: PreTrainedModel, config: Mapping[str, Any]) -> None:
    """Make the embedding's factor the number that training used, whatever precision the model is loaded in."""
    number = trained_embedding_scale(config)
    scale = getattr(backbone.get_input_embeddings(), "embed_scale", None)
    if number is not None and isinstance(scale, torch.Tensor):
        scale.fill_(number)


def load_interface(checkpoint: Checkpoint) -> PITInterface:
    """The interface of a PIT checkpoint, its memory re-orthonormalised where it has drifted (with a note)."""
    arrays = read_interface(checkpoint)
    bridge = None if arrays.bridge is None else torch.as_tensor(arrays.bridge, dtype=torch.float32)
    return PITInterface(
        torch.from_numpy(arrays.memory),
        torch.from_numpy(arrays.cholesky).float(),
        bridge,
        memory_kind=checkpoint.config["pit"]["memory"],
    )


def interface_tensors(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The interface in the terms of the checkpoint format: `L` itself, so that no parametrisation is implied."""
    cholesky = raw_to_cholesky(state["pit.raw_cholesky"], state["pit.cholesky_anchor"])
    tensors = [("pit.memory", state["pit.memory"]), ("pit.cholesky", cholesky)]
    tensors += [(k, state[k]) for k in ("pit.bridge", "pit.embedding_multiplier") if k in state]
    return [(name, tensor.float()) for name, tensor in tensors]


def pit_config(
    config: dict[str, Any], memory: str, bridge: str, architectures: list[str] | None
) -> dict[str, Any]:
    """config.json of a PIT checkpoint, from the backbone's."""
    own = {
        "version": OWN_VERSION,
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
        raise InputError(f"{checkpoint.label} does not fit its config: {'; '.join(problems)}.")
    values = {}
    for name, target in wanted.items():
        value = checkpoint.read_torch(name)
        if value.shape != target.shape:
            raise InputError(
                f"{checkpoint.label}: {name} has shape {list(value.shape)}, its config asks for "
                f"{list(target.shape)}."
            )
        values[name] = value.to(target.dtype)
    backbone.load_state_dict(values, assign=True)  # the tensors themselves: a copy would double the memory


def _move_files(source: Path, target: Path) -> None:
    """Put the files of a finished checkpoint into an existing directory, config.json last, and drop old shards."""
    new = sorted((p for p in source.rglob("*") if p.is_file()), key=lambda p: p.name == "config.json")
    stale = {*target.glob("model*.safetensors"), *target.glob("model.safetensors.index.json")}
    for file in new:
        place = target / file.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        file.replace(place)
        stale.discard(place)
    for file in stale:
        file.unlink()
    shutil.rmtree(source)


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The type of the backbone's tensors as stored; float32 where there are several."""
    kinds = {info.dtype for name, info in checkpoint.tensors.items() if not name.startswith("pit.")}
    known = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    return known[next(iter(kinds))] if len(kinds) == 1 and kinds <= set(known) else torch.float32
