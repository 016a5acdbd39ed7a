"""Which precision each group of matrices needs: the smallest artifact inside a gate on KL, or the best in a size.

Each group is tried alone in its coarser precision and the KL against the float model is measured. Groups then
go down in the order of KL per byte saved. Effects don't add exactly, so the cut is found by measuring joint
choices (bisection), and what is returned has been measured as a whole. A token table is too large a step for
that line: each of its states gets a line of its own, and the best of them is taken.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pit_deploy.errors import InputError
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.hessians import GROUPS
from pit_deploy.quantize.plan import Rounded

if TYPE_CHECKING:
    import torch

    from pit_deploy.runtimes.torch import TorchRuntime

FLOAT_BITS = 32
LARGE = 0.05  # share of all that can be saved, from which on a group is tried in each of its states
MAX_LARGE = 2
TABLE = "table"
RANKING_WINDOWS = 2
WHOLE_ROW = 2**31
"""A block of activations that no row is longer than: one scale a token."""


@dataclass(frozen=True)
class Group:
    """Tensors that change precision together. `nbytes` and `kl` go by bits: the size, and the KL against the
    float model where this group alone has these bits."""

    name: str
    tensors: tuple[str, ...]
    nbytes: Mapping[int, int]
    kl: Mapping[int, float]


@dataclass(frozen=True)
class GroupChoice:
    """A row of the table of choices. `kl` is of the group alone in `bits`."""

    group: str
    bits: int
    nbytes: int
    kl: float


@dataclass(frozen=True)
class PrecisionChoice:
    """Bits of each tensor by name (32 stands for float), and what the choice costs as a whole.

    `kl` was measured with all of them in place; `nbytes` counts the groups' tensors and `fixed_bytes`.
    """

    bits: dict[str, int]
    groups: tuple[GroupChoice, ...]
    kl: float
    nbytes: int
    max_kl: float | None = None
    max_bytes: int | None = None
    trials: tuple[tuple[int, float], ...] = field(default=())
    """Bytes and KL of each joint choice that was measured."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for manifest and report."""
        return {
            **asdict(self),
            "groups": [asdict(g) for g in self.groups],
            "trials": [list(t) for t in self.trials],
        }


def choose_precision(
    groups: Sequence[Group],
    measure: Callable[[Mapping[str, int]], float],
    *,
    max_kl: float | None = None,
    max_bytes: int | None = None,
    fixed_bytes: int = 0,
    progress: Progress = silent,
) -> PrecisionChoice:
    """The smallest choice with `measure(bits by group) <= max_kl`, or the best one of at most `max_bytes`.

    All groups start in their finest precision. Raises `InputError` where even that is above `max_kl` (with
    the KL it has) or the coarsest is above `max_bytes` (with its size), or where not exactly one is given.
    """
    if (max_kl is None) == (max_bytes is None):
        raise InputError(
            "give one of --max-kl and --max-bytes: the search keeps the one and minimises the other."
        )
    large, small = _by_size(groups)
    best: PrecisionChoice | None = None
    trials: list[tuple[int, float]] = []
    finest: float | None = None
    for combination in itertools.product(*(sorted(group.nbytes, reverse=True) for group in large)):
        fixed = {group.name: bits for group, bits in zip(large, combination, strict=True)}
        search = _Search(groups, fixed, _moves(small), measure, fixed_bytes, trials, progress)
        count = search.largest_within(max_bytes) if max_kl is None else search.smallest_within(max_kl)
        finest = search.known.get(0) if finest is None else finest
        if count is None:
            continue
        found = search.choice(count, max_kl, max_bytes)
        if best is None or (found.kl < best.kl if max_kl is None else found.nbytes < best.nbytes):
            best = found
    if best is not None:
        return replace(best, trials=tuple(trials))
    if max_bytes is not None:
        least = fixed_bytes + sum(min(group.nbytes.values()) for group in groups)
        raise InputError(f"--max-bytes {max_bytes} cannot be met: the smallest choice has {least} bytes.")
    raise InputError(
        f"--max-kl {max_kl:g} cannot be met: the best reached is {finest:.3g}, with "
        f"{max(max(group.nbytes) for group in groups)}-bit tensors throughout."
    )


class _Search:
    """Choices along one line: the large groups `fixed`, the others going down move by move."""

    def __init__(
        self,
        groups: Sequence[Group],
        fixed: Mapping[str, int],
        moves: Sequence[tuple[str, int]],
        measure: Callable[[Mapping[str, int]], float],
        fixed_bytes: int,
        trials: list[tuple[int, float]],
        progress: Progress,
    ) -> None:
        self.groups, self.fixed, self.moves = groups, fixed, moves
        self.measure, self.fixed_bytes = measure, fixed_bytes
        self.trials, self.progress = trials, progress
        self.known: dict[int, float] = {}

    def bits(self, count: int) -> dict[str, int]:
        bits = {group.name: max(group.nbytes) for group in self.groups} | dict(self.fixed)
        bits.update(self.moves[:count])  # later moves of a group go further down
        return bits

    def nbytes(self, count: int) -> int:
        bits = self.bits(count)
        return self.fixed_bytes + sum(group.nbytes[bits[group.name]] for group in self.groups)

    def kl(self, count: int) -> float:
        if count not in self.known:
            self.known[count] = self.measure(self.bits(count))
            self.trials.append((self.nbytes(count), self.known[count]))
            self.progress("search", len(self.trials), len(self.trials) + 1)
        return self.known[count]

    def largest_within(self, max_bytes: int | None) -> int | None:
        """The fewest moves that fit into `max_bytes`."""
        assert max_bytes is not None
        return next((n for n in range(len(self.moves) + 1) if self.nbytes(n) <= max_bytes), None)

    def smallest_within(self, max_kl: float) -> int | None:
        """The most moves inside the gate, by bisection: what is returned has been measured."""
        if not self.kl(0) <= max_kl:
            return None
        low, high = 0, len(self.moves) + 1  # low is inside the gate; high is outside, or past the end
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.kl(middle) <= max_kl else (low, middle)
        return low

    def choice(self, count: int, max_kl: float | None, max_bytes: int | None) -> PrecisionChoice:
        chosen = self.bits(count)
        rows = [(group, chosen[group.name]) for group in self.groups]
        return PrecisionChoice(
            bits={name: bits for group, bits in rows for name in group.tensors},
            groups=tuple(
                GroupChoice(g.name, bits, g.nbytes[bits], float(g.kl.get(bits, 0.0))) for g, bits in rows
            ),
            kl=self.kl(count),
            nbytes=self.nbytes(count),
            max_kl=max_kl,
            max_bytes=max_bytes,
        )


def _by_size(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Groups so large that one step overshoots any target, of which all states are tried; and the others."""
    spans = [max(group.nbytes.values()) - min(group.nbytes.values()) for group in groups]
    limit = LARGE * sum(spans)
    large = sorted((s, n) for n, s in enumerate(spans) if s > limit)[-MAX_LARGE:] if len(groups) > 8 else []
    chosen = {n for _, n in large}
    return (
        [group for n, group in enumerate(groups) if n in chosen],
        [group for n, group in enumerate(groups) if n not in chosen],
    )


def _moves(groups: Sequence[Group]) -> list[tuple[str, int]]:
    """Steps to fewer bits, the cheapest in KL per byte first; a group's steps stay in their order.

    Where a later step is cheaper than the one before it, both are taken as one.
    """
    found: list[tuple[float, int, str, int]] = []
    for number, group in enumerate(groups):
        ladder = sorted(group.nbytes, reverse=True)
        steps: list[tuple[float, float, int]] = []  # KL, bytes, bits reached
        for finer, coarser in itertools.pairwise(ladder):
            cost: float = max(group.kl.get(coarser, 0.0) - group.kl.get(finer, 0.0), 0.0)
            saved: float = group.nbytes[finer] - group.nbytes[coarser]
            while steps and cost * steps[-1][1] < steps[-1][0] * saved:
                cost, saved = cost + steps[-1][0], saved + steps.pop()[1]
            steps.append((cost, saved, coarser))
        found += [(cost / max(saved, 1), number, group.name, bits) for cost, saved, bits in steps]
    return [(name, bits) for _, _, name, bits in sorted(found, key=lambda move: (move[0], move[1], -move[3]))]


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
        self.runtime, self.windows, self.tensors = runtime, windows, tensors
        self.activations = activations
        self.layers: Any = runtime.decoder.layers
        self._modules = {name: _owners(runtime, name) for name in tensors}
        self._float = {name: owners[0].weight.data for name, owners in self._modules.items()}
        self._states: list[list[torch.Tensor]] = []  # by window and layer
        self._reference: list[torch.Tensor] = []
        for window in windows:
            states: list[torch.Tensor] = []
            with contextlib.ExitStack() as hooks:
                for layer in self.layers:
                    hooks.enter_context(_inputs(layer, states))
                self._reference.append(self._log_probabilities(window))
            self._states.append(states)

    def kl(
        self,
        bits: Mapping[str, int],
        *,
        float_activations: bool = False,
        windows: Sequence[int] | None = None,
    ) -> tuple[float, float]:
        """Mean KL and top-1 agreement with the float model, the tensors in `bits` exchanged, others float.

        On all windows, or on those of the given numbers.
        """
        numbers = range(len(self.windows)) if windows is None else windows
        changed = [name for name, count in bits.items() if count != FLOAT_BITS]
        activations = None if float_activations else self.activations
        first = 0 if activations else min((_layer_of(name) for name in changed), default=0)
        total, agree, positions = 0.0, 0, 0
        try:
            for name in changed:
                self._put(name, self.tensors[name][bits[name]])
            with contextlib.ExitStack() as stack:
                if activations is not None:
                    stack.enter_context(simulated_activations(self.runtime, activations))
                for number in numbers:
                    window, states = self.windows[number], self._states[number]
                    reference = self._reference[number]
                    with _start_at(self.layers, first, states[first] if first > 0 else None):
                        found = self._log_probabilities(window)
                    total += float((reference.exp() * (reference - found)).sum())
                    agree += int((reference.argmax(-1) == found.argmax(-1)).sum())
                    positions += len(window)
        finally:
            for name in changed:
                for module in self._modules[name]:
                    module.weight.data = self._float[name]
        return total / positions, agree / positions

    def groups(self, candidates: Sequence[int], progress: Progress = silent) -> list[Group]:
        """The model's groups with sizes and KL. `candidates` are the bits to choose from, 32 among them where tensors
        may stay float.

        The finest of them counts as free. The coarsest is measured, on a part of the windows, and those between
        follow from it by the square of their rounding errors: it ranks, and what is chosen is measured on all.
        """
        found: list[Group] = []
        members = group_tensors(list(self.tensors))
        coarsest, *between = sorted(set(candidates))[:-1]
        start = max(0, (len(self.windows) - RANKING_WINDOWS) // 2)
        some = range(len(self.windows))[start : start + RANKING_WINDOWS]
        for number, (name, tensors) in enumerate(members.items()):
            progress("sensitivity", number, len(members))
            sizes = {bits: sum(self._nbytes(tensor, bits) for tensor in tensors) for bits in candidates}
            # Rounded activations cost the same in each of these, and would hide what the group itself does.
            coarse = dict.fromkeys(tensors, coarsest)
            kl = {coarsest: self.kl(coarse, float_activations=True, windows=some)[0]}
            if between:
                energy = {
                    bits: sum(self._error(tensor, bits) for tensor in tensors)
                    for bits in (coarsest, *between)
                }
                kl |= {bits: kl[coarsest] * energy[bits] / max(energy[coarsest], 1e-30) for bits in between}
            found.append(Group(name, tensors, sizes, kl))
        progress("sensitivity", len(members), len(members))
        return found

    def of_groups(self, groups: Sequence[Group]) -> Callable[[Mapping[str, int]], float]:
        """`measure` for `choose_precision`."""
        return lambda bits: self.kl({t: bits[g.name] for g in groups for t in g.tensors})[0]

    def _nbytes(self, name: str, bits: int) -> int:
        if bits == FLOAT_BITS:
            return self._float[name].numel() * 4
        return self.tensors[name][bits].nbytes

    def _error(self, name: str, bits: int) -> float:
        """Squared rounding error of a tensor."""
        difference = self.tensors[name][bits].dequantize() - self._float[name].numpy()
        return float((difference * difference).sum())

    def _put(self, name: str, tensor: Rounded) -> None:
        import torch

        value = torch.from_numpy(tensor.dequantize())
        for module in self._modules[name]:
            module.weight.data = value

    def _log_probabilities(self, window: Sequence[int]) -> torch.Tensor:
        import torch

        with torch.no_grad():
            logits = self.runtime.model(input_ids=torch.tensor([list(window)]), use_cache=False).logits[0]
            return torch.log_softmax(logits.float(), -1)


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
