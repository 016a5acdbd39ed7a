"""What each group of matrices costs the model in few bits: its KL against the float model on some windows of text.

Each group is tried alone in its coarser precision (`Trial.groups`), and joint choices as the search asks for them
(`precision_search`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.hessians import GROUPS
from pit_deploy.quantize.plan import Rounded
from pit_deploy.quantize.precision_search import Group

if TYPE_CHECKING:
    import torch

    from pit_deploy.runtimes.torch import TorchRuntime

FLOAT_BITS = 32
TABLE = "table"
RANKING_WINDOWS = 2
_ROWS_AT_ONCE = 32
WHOLE_ROW = 2**31
"""A block of activations that no row is longer than: one scale a token."""


class Trial:
    """A float model in which tensors are exchanged for quantised ones, and its KL on some windows of text.

    `tensors` has the candidates by name and bits. Tables go by the names that exporters use. `activations` is
    the block size of int8 activations to simulate (None: float activations): ONNX Runtime's accuracy level 4
    rounds the inputs of each matrix so, ExecuTorch a `WHOLE_ROW` at a time.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        windows: Sequence[Sequence[int]],
        tensors: Mapping[str, Mapping[int, Rounded]],
        *,
        activations: int | None = None,
    ) -> None:
        import torch

        self.runtime, self.windows, self.tensors = runtime, windows, tensors
        self.activations = activations
        self.layers: Any = runtime.decoder.layers
        self._modules = {name: _owners(runtime, name) for name in tensors}
        self._float = {name: owners[0].weight.data for name, owners in self._modules.items()}
        self._placed: dict[str, int] = {}  # bits of what is exchanged now
        self._states: list[list[torch.Tensor]] = []  # by window and layer, the final norm last
        self._reference: list[torch.Tensor] = []
        for window in windows:
            states: list[torch.Tensor] = []
            with contextlib.ExitStack() as hooks:
                for module in (*self.layers, runtime.decoder.norm):
                    hooks.enter_context(_inputs(module, states))
                self._reference.append(torch.log_softmax(self._logits(window), -1))
            self._states.append(states)

    def kl(
        self,
        bits: Mapping[str, int],
        *,
        float_activations: bool = False,
        windows: Sequence[int] | None = None,
        keep: bool = False,
    ) -> tuple[float, float]:
        """Mean KL and top-1 agreement with the float model, the tensors in `bits` exchanged, others float.

        On all windows, or on those of the given numbers. With `keep` the tensors stay in place until the next call,
        which exchanges no more than it must.
        """
        import torch

        numbers = range(len(self.windows)) if windows is None else windows
        changed = [name for name, count in bits.items() if count != FLOAT_BITS]
        activations = None if float_activations else self.activations
        first = 0 if activations else min((_layer_of(name) for name in changed), default=0)
        total, agree, positions = 0.0, 0, 0
        try:
            self._place(bits)
            with contextlib.ExitStack() as stack:
                if activations is not None:
                    stack.enter_context(simulated_activations(self.runtime, activations))
                for number in numbers:
                    window, states = self.windows[number], self._states[number]
                    with _start_at(self.layers, first, states[first] if first > 0 else None):
                        logits = self._logits(window)
                    parts = zip(
                        self._reference[number].split(_ROWS_AT_ONCE), logits.split(_ROWS_AT_ONCE), strict=True
                    )
                    for reference, part in parts:  # whole windows would be several large temporaries
                        found = torch.log_softmax(part, -1)
                        total += float((reference.exp() * (reference - found)).sum())
                        agree += int((reference.argmax(-1) == found.argmax(-1)).sum())
                    positions += len(window)
        finally:
            if not keep:
                self._place({})
        return total / positions, agree / positions

    def groups(
        self, candidates: Sequence[int], progress: Progress = silent, *, by_layer: bool = False
    ) -> list[Group]:
        """The model's groups with sizes and KL. `candidates` are the bits to choose from, 32 among them where tensors
        may stay float.

        The finest of them counts as free. The coarsest is measured, on a part of the windows, and those between
        follow from it by the square of their rounding errors: it ranks, and what is chosen is measured on all.
        With `by_layer` the groups of a layer are measured together, which takes a third of the time, and share the KL
        by what each of them does to the layer's output.
        """
        found: list[Group] = []
        members = group_tensors(list(self.tensors))
        coarsest, *between = sorted(set(candidates))[:-1]
        parts = list(_of_layers(members) if by_layer else ((name,) for name in members))
        for number, names in enumerate(parts):
            progress("sensitivity", number, len(parts))
            effects = self._effects({name: members[name] for name in names}, coarsest)
            for name in names:
                tensors = members[name]
                sizes = {bits: sum(self._nbytes(tensor, bits) for tensor in tensors) for bits in candidates}
                kl = {coarsest: effects[name]}
                if between:
                    energy = {
                        bits: sum(self._error(tensor, bits) for tensor in tensors)
                        for bits in (coarsest, *between)
                    }
                    kl |= {
                        bits: kl[coarsest] * energy[bits] / max(energy[coarsest], 1e-30) for bits in between
                    }
                found.append(Group(name, tensors, sizes, kl))
        progress("sensitivity", len(parts), len(parts))
        return found

    def _effects(self, members: Mapping[str, Sequence[str]], bits: int) -> dict[str, float]:
        """What each of these groups, of one layer if they are several, adds to the KL."""
        start = max(0, (len(self.windows) - RANKING_WINDOWS) // 2)
        some = range(len(self.windows))[start : start + RANKING_WINDOWS]
        every = {tensor: bits for tensors in members.values() for tensor in tensors}
        # Rounded activations cost the same in each of these, and would hide what the group itself does.
        kl = self.kl(every, float_activations=True, windows=some)[0]
        if len(members) == 1:
            return dict.fromkeys(members, kl)
        errors = {
            name: self._output_error(dict.fromkeys(tensors, bits), some) for name, tensors in members.items()
        }
        return {name: kl * error / max(sum(errors.values()), 1e-30) for name, error in errors.items()}

    def _output_error(self, bits: Mapping[str, int], windows: Sequence[int]) -> float:
        """Square of the change of a layer's output over the output's, summed over tokens, its tensors in `bits`
        exchanged: the next norm divides each token by its own size."""
        number = min(map(_layer_of, bits))
        total = 0.0
        try:
            self._place(bits)
            for window in windows:
                states = self._states[window]
                found: list[torch.Tensor] = []
                with contextlib.ExitStack() as stack, contextlib.suppress(_Stop):
                    stack.enter_context(_start_at(self.layers, number, states[number] if number else None))
                    stack.enter_context(_only_until(self.layers[number], found))
                    self._logits(self.windows[window])
                exact = states[number + 1]
                change = (found[0] - exact).pow(2).sum(-1)
                total += float((change / exact.pow(2).sum(-1).clamp(min=1e-30)).sum())
        finally:
            self._place({})
        return total

    def of_groups(self, groups: Sequence[Group]) -> Callable[[Mapping[str, int]], float]:
        """`measure` for `choose_precision`. Floats that no group may keep are let go, so that nothing else can be
        measured afterwards."""
        for group in groups:
            if FLOAT_BITS not in group.nbytes:
                for name in group.tensors:
                    del self._float[name]
        return lambda bits: self.kl({t: bits[g.name] for g in groups for t in g.tensors}, keep=True)[0]

    def _nbytes(self, name: str, bits: int) -> int:
        if bits == FLOAT_BITS:
            return self._float[name].numel() * 4
        return self.tensors[name][bits].nbytes

    def _error(self, name: str, bits: int) -> float:
        """Squared rounding error of a tensor."""
        difference = self.tensors[name][bits].dequantize() - self._float[name].numpy()
        return float((difference * difference).sum())

    def _place(self, bits: Mapping[str, int]) -> None:
        """Exchange the tensors in `bits`, and put back what else is exchanged."""
        import torch

        wanted = {name: count for name, count in bits.items() if count != FLOAT_BITS}
        for name in self._placed.keys() - wanted.keys():
            self._set(name, self._float[name])
            del self._placed[name]
        for name, count in wanted.items():
            if self._placed.get(name) != count:
                self._set(name, torch.empty(0))  # lets go of a table before the next one is made
                self._placed[name] = count
                self._set(name, torch.from_numpy(self.tensors[name][count].dequantize()))

    def _set(self, name: str, value: torch.Tensor) -> None:
        for module in self._modules[name]:
            module.weight.data = value

    def _logits(self, window: Sequence[int]) -> torch.Tensor:
        import torch

        with torch.no_grad():
            logits = self.runtime.model(input_ids=torch.tensor([list(window)]), use_cache=False).logits[0]
            return logits.float()


def group_tensors(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Tensors by group, in the order of the layers: `layers.N.qkv` and so on, `table` for what is outside."""
    found: dict[str, tuple[str, ...]] = {}
    kinds = {f"{name}.weight": kind for kind, members in GROUPS for name in members}
    for name in names:
        group = TABLE
        if name.startswith("model.layers."):
            number, inner = name.removeprefix("model.layers.").split(".", 1)
            group = f"layers.{number}.{kinds.get(inner, inner)}"
        found[group] = (*found.get(group, ()), name)
    return found


@contextlib.contextmanager
def simulated_activations(runtime: TorchRuntime, block_size: int) -> Iterator[None]:
    """Round the inputs of all matrices, the head among them, to int8: each block by its own largest magnitude / 127."""
    with contextlib.ExitStack() as hooks:
        modules = [
            m for layer in runtime.decoder.layers for m in layer.modules() if hasattr(m, "in_features")
        ]
        for module in modules:
            handle = module.register_forward_pre_hook(
                lambda _, args: (round_activations(args[0], block_size), *args[1:])
            )
            hooks.callback(handle.remove)
        head = runtime.model.get_output_embeddings()
        if getattr(head, "matrix", None) is None:  # with a map, the table sees the mapped state
            handle = head.register_forward_pre_hook(
                lambda _, args: (round_activations(args[0], block_size), *args[1:])
            )
            hooks.callback(handle.remove)
        yield


def round_activations(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """`x` [..., columns] as int8 activations stand for it; the last block may be short."""
    import torch
    from torch.nn import functional as F

    columns = x.shape[-1]
    block_size = min(block_size, columns)
    blocks = -(-columns // block_size)
    blocked = F.pad(x, (0, blocks * block_size - columns)).unflatten(-1, (blocks, block_size))
    scale = (blocked.abs().amax(-1, keepdim=True) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    return ((blocked / scale).round_() * scale).flatten(-2)[..., :columns]


def _owners(runtime: TorchRuntime, name: str) -> list[Any]:
    """The modules whose weight a tensor is; a shared table has two."""
    if name.startswith("model.layers."):
        number, inner = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
        return [runtime.decoder.layers[int(number)].get_submodule(inner)]
    embedding, head = runtime.model.get_input_embeddings(), runtime.model.get_output_embeddings()
    if name == "lm_head.weight":
        return [head]
    return [embedding, head] if embedding.weight.data_ptr() == head.weight.data_ptr() else [embedding]


def _layer_of(name: str) -> int:
    """The first layer that a tensor can change; a head changes none, but is counted from the start."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def _of_layers(groups: Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The groups of each layer together; what is outside the layers alone."""
    for _, names in itertools.groupby(groups, key=lambda name: name.rpartition(".")[0] or name):
        yield tuple(names)


class _Stop(Exception):
    pass


@contextlib.contextmanager
def _only_until(layer: Any, found: list[torch.Tensor]) -> Iterator[None]:
    """Keep a layer's output and end the pass there, with `_Stop`."""

    def hook(_: Any, args: Any, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)
        raise _Stop

    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _inputs(module: Any, found: list[torch.Tensor]) -> Iterator[None]:
    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args[0] if args else kwargs["hidden_states"]).clone())

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _start_at(layers: Any, first: int, state: torch.Tensor | None) -> Iterator[None]:
    """Let the layers before `first` pass their input on, and give layer `first` the input `state`."""
    if state is None:
        yield
        return

    def skip(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    def replace(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ((state, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": state})

    handle = layers[first].register_forward_pre_hook(replace, with_kwargs=True)
    try:
        for layer in layers[:first]:
            layer.forward = skip
        yield
    finally:
        handle.remove()
        for layer in layers[:first]:
            del layer.forward
