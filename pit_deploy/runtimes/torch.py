"""PyTorch runtimes: the training-time model, a folded model, and a plain checkpoint in transformers.

They are the reference of parity. All run in float32 on the CPU, the PIT interface's d x d part in float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from pit_deploy.checkpoint import Checkpoint
from pit_deploy.errors import InputError
from pit_deploy.folding import FoldedModel, SharedTable, UntiedTables
from pit_deploy.model import PITForCausalLM, build_backbone, embedding_scale, quiet, set_embedding_scale_
from pit_deploy.runtimes.base import check_room


class TorchRuntime:
    """A causal model of transformers (or `PITForCausalLM`) behind the runtime protocol."""

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        context_length: int | None = None,
        tokenizer_length: int | None = None,
        precise: bool = True,
    ) -> None:
        self.name = name
        self.model = model.eval()
        config = model.config
        self.context_length = int(context_length or config.max_position_embeddings)
        self.vocab_size = int(config.vocab_size)
        self.precise = precise
        self._masked_from = tokenizer_length if tokenizer_length is not None else self.vocab_size
        self._cache: Any = None

    @property
    def position(self) -> int:
        return 0 if self._cache is None else int(self._cache.get_seq_length())

    @property
    def decoder(self) -> Any:
        """The stack of layers, with `layers` and `norm`."""
        model = self.model
        return model.decoder if isinstance(model, PITForCausalLM) else getattr(model, model.base_model_prefix)

    def reset(self) -> None:
        self._cache = None

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        check_room(self, ids)
        if self._cache is None:
            self._cache = DynamicCache(config=self.model.config)
        return self._forward(ids, cache=self._cache, use_cache=True, logits_to_keep=1)[-1]

    def decode(self, id: int) -> np.ndarray:
        return self.prefill([id])

    def last_logits(self, ids: Sequence[int]) -> np.ndarray:
        """One pass a token: several in one pass would be rounded otherwise, and a reference need not be fast."""
        check_room(self, ids)
        return np.stack([self.decode(id) for id in ids])

    def rewind(self, position: int) -> None:
        """Raises `InputError` where a sliding window has already dropped what would be needed."""
        if not 0 <= position <= self.position:
            raise ValueError(f"there is no way from {self.position} tokens back to {position}")
        if position == self.position:
            return
        if position == 0:
            self.reset()
            return
        window = getattr(self.model.config, "sliding_window", None)
        if window is not None and self.position >= window:
            raise InputError(
                f"{self.name} cannot take back tokens: the text of {self.position} is longer than the sliding window "
                f"of {window}; run it without speculation."
            )
        self._cache.crop(position - self.position)

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        self.reset()
        check_room(self, ids)
        return self._forward(ids, use_cache=False)

    def hidden_states(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        self.reset()
        check_room(self, ids)
        states: list[np.ndarray] = []
        layers = self.decoder.layers
        with contextlib.ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(_before(layer, lambda x: states.append(x[0].float().numpy().copy())))
            hooks.enter_context(
                _before(self.decoder.norm, lambda x: states.append(x[0].float().numpy().copy()))
            )
            logits = self._forward(ids, use_cache=False)
        return np.stack(states), logits

    def final_states(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The state after the final norm before its gain, float64 [tokens, hidden_size], and the logits."""
        self.reset()
        check_room(self, ids)
        found: list[torch.Tensor] = []
        norm = self.decoder.norm
        with _before(norm, lambda x: found.append(x[0].double())):
            logits = self._forward(ids, use_cache=False)
        eps: float = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        x = found[0]
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)).numpy(), logits

    @torch.no_grad()
    def _forward(self, ids: Sequence[int], **kwargs: Any) -> np.ndarray:
        exact = (
            self.model.pit.precise()
            if self.precise and isinstance(self.model, PITForCausalLM)
            else contextlib.nullcontext()
        )
        with exact:
            logits: torch.Tensor = self.model(input_ids=torch.tensor([list(ids)]), **kwargs).logits[0].float()
        # Rows without a token can never be generated; exporters mask them in the graph.
        logits[:, self._masked_from :] = torch.finfo(torch.float32).min / 2
        return logits.numpy()


def open_training(
    checkpoint: Checkpoint, *, context_length: int | None = None, precise: bool = True
) -> TorchRuntime:
    """The training-time forward of a PIT checkpoint: gather, triangular solves, `Z (T h)`."""
    model = PITForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return TorchRuntime(
        model,
        name="training",
        context_length=context_length,
        tokenizer_length=_tokens(checkpoint),
        precise=precise,
    )


def open_plain(checkpoint: Checkpoint, *, context_length: int | None = None) -> TorchRuntime:
    """A plain checkpoint as transformers runs it, in float32.

    Raises `InputError` where transformers cannot load it, or would make up a tensor that the files lack.
    """
    try:
        with quiet():
            config = transformers.AutoConfig.from_pretrained(checkpoint.path)
            config.vocab_size = checkpoint.table_rows  # the rows are the truth where the two differ
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                checkpoint.path,
                config=config,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with their names
            )
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{checkpoint.label}: transformers cannot load this checkpoint: {reason[:300]}"
        ) from error
    model, info = loaded
    set_embedding_scale_(model, checkpoint.config)
    missing = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if missing:
        raise InputError(
            f"{checkpoint.path} does not fit its config: missing or of another shape: {', '.join(missing[:8])}"
            f"{f' and {len(missing) - 8} more' if len(missing) > 8 else ''}."
        )
    return TorchRuntime(
        model, name="transformers", context_length=context_length, tokenizer_length=_tokens(checkpoint)
    )


def open_folded(
    model: FoldedModel, *, context_length: int | None = None, tokenizer_length: int | None = None
) -> TorchRuntime:
    """A folded model of either layout, in float32 PyTorch."""
    backbone = build_backbone(model.config, model.vocab_size, torch.float32)
    _exchange_tables(backbone, model.tables, embedding_scale(backbone))
    values = {name: torch.from_numpy(model.read(name)) for name in backbone.state_dict()}
    backbone.load_state_dict(values, assign=True)
    return TorchRuntime(
        backbone, name="folded", context_length=context_length, tokenizer_length=tokenizer_length
    )


class _FoldedEmbedding(nn.Module):
    def __init__(self, table: torch.Tensor, matrix: torch.Tensor | None, scale: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.matrix, self.scale = table, matrix, scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = F.embedding(input_ids, self.weight)
        if self.matrix is not None:
            x = (x.double() @ self.matrix).float()
        return x if self.scale is None else x * self.scale.to(x.dtype)


class _FoldedHead(nn.Module):
    def __init__(self, table: torch.Tensor, matrix: torch.Tensor | None) -> None:
        super().__init__()
        self.weight, self.matrix = table, matrix

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.matrix is not None:
            hidden_states = (hidden_states.double() @ self.matrix.T).float()
        return F.linear(hidden_states, self.weight)


def _exchange_tables(
    backbone: PreTrainedModel, tables: SharedTable | UntiedTables, scale: torch.Tensor | None
) -> None:
    if isinstance(tables, UntiedTables):
        embedding, head = torch.from_numpy(tables.embedding), torch.from_numpy(tables.head)
        embedding_map = head_map = None
    else:
        embedding = head = torch.from_numpy(tables.table)
        embedding_map, head_map = _matrix(tables.embedding_map), _matrix(tables.head_map)
    backbone.set_input_embeddings(_FoldedEmbedding(embedding, embedding_map, scale))
    backbone.set_output_embeddings(_FoldedHead(head, head_map))


def _matrix(value: np.ndarray | None) -> torch.Tensor | None:
    return None if value is None else torch.from_numpy(value).double()


def _tokens(checkpoint: Checkpoint) -> int | None:
    return checkpoint.tokenizer_length() if checkpoint.is_tokenized() else None


@contextlib.contextmanager
def _before(module: nn.Module, use: Any) -> Iterator[None]:
    """Call `use` with the first input (hidden states) of a module at each call."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        use(args[0] if args else kwargs["hidden_states"])

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
