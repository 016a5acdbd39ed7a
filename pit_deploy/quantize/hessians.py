"""Error feedback through a whole model: one layer after another, on the inputs that the layer will really get.

The calibration windows run through the model block by block. For each layer the second moments of its
matrices' inputs are summed, its matrices are quantised and put in place, and the windows move on through the
quantised layer. So a later layer answers for what the earlier ones cost, and only one layer's moments are in
memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.files import atomic_output
from pit_deploy.progress import Progress, silent
from pit_deploy.quantize.error_feedback import FeedbackOptions, quantize_with_feedback
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.tensor import QuantizedTensor

if TYPE_CHECKING:
    import torch

    from pit_deploy.runtimes.torch import TorchRuntime

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("o", ("self_attn.o_proj",)),
    ("gate_up", ("mlp.gate_proj", "mlp.up_proj")),
    ("down", ("mlp.down_proj",)),
)
"""The matrices of a layer by what they read: those of a group share their input, and so its second moment."""

TOKENS = 8192
WINDOW = 256


def calibration_windows(ids: Sequence[int], *, tokens: int = TOKENS, window: int = WINDOW) -> list[list[int]]:
    """Windows of equal length, spread evenly over a text's `ids`, each from a multiple of `window` on.

    A text shorter than a window is one window. Raises `InputError` for an empty text.
    """
    return _spread(ids, tokens, window)[0]


def other_windows(ids: Sequence[int], *, tokens: int, window: int = WINDOW) -> list[list[int]]:
    """The windows of a text that `calibration_windows` with the same arguments leaves out."""
    return _spread(ids, tokens, window)[1]


def _spread(ids: Sequence[int], tokens: int, window: int) -> tuple[list[list[int]], list[list[int]]]:
    if not ids:
        raise InputError("the calibration text has no tokens; give a longer one.")
    size = min(window, len(ids))
    cut = len(ids) // size
    count = min(cut, max(1, tokens // size))
    chosen = np.linspace(0, cut - 1, count).astype(int).tolist()
    windows = [list(ids[n * size : (n + 1) * size]) for n in range(cut)]
    return [windows[n] for n in chosen], [windows[n] for n in sorted(set(range(cut)) - set(chosen))]


def held_out_windows(ids: Sequence[int], *, every: int, window: int = WINDOW) -> tuple[list[int], list[int]]:
    """`ids` in two: all windows but each `every`th, and those. A text of fewer windows is cut near its end."""
    if len(ids) < every * window:
        held = len(ids) - len(ids) // every
        return list(ids[:held]), list(ids[held:])
    kept: list[int] = []
    held_out: list[int] = []
    for n, start in enumerate(range(0, len(ids) - window + 1, window)):
        (held_out if n % every == every - 1 else kept).extend(ids[start : start + window])
    return kept, held_out


class LayerStack:
    """The layers of a reference model, to be walked one at a time with the states of all windows."""

    def __init__(self, runtime: TorchRuntime, windows: Sequence[Sequence[int]]) -> None:
        if len({len(window) for window in windows}) != 1:
            raise InputError("calibration windows must have one length.")
        self.layers: Any = runtime.decoder.layers
        self._extra: list[dict[str, Any]] = [{} for _ in self.layers]
        self.states: list[torch.Tensor] = []
        """The input of the layer to come, [1, tokens, hidden_size] a window."""
        first = self._first_layer
        for number, window in enumerate(windows):
            with contextlib.ExitStack() as hooks:
                hooks.enter_context(_capture(self.layers[0], first))
                if number == 0:  # masks and rotations are the same for all windows
                    for layer, extra in zip(self.layers, self._extra, strict=True):
                        hooks.enter_context(_capture(layer, _keep_others(extra)))
                    runtime.final_states(window)
                else:
                    with contextlib.suppress(_Stop):
                        hooks.enter_context(_capture(self.layers[0], _stop))
                        runtime.final_states(window)

    def matrices(self, number: int, group: Sequence[str]) -> dict[str, Any]:
        """The `Linear` modules of a group in one layer, by name inside the layer."""
        found = {}
        for name in group:
            with contextlib.suppress(AttributeError):
                found[name] = self.layers[number].get_submodule(name)
        return found

    def run(self, number: int, states: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The outputs of one layer for the given inputs, one window after another."""
        import torch

        layer, extra = self.layers[number], self._extra[number]
        for state in states:
            with torch.no_grad():
                out = layer(state, **extra)
            yield out[0] if isinstance(out, tuple) else out

    def _first_layer(self, state: torch.Tensor, kwargs: dict[str, Any]) -> None:
        self.states.append(state.detach().clone())


def input_moments(
    stack: LayerStack, number: int, groups: Sequence[tuple[str, ...]], states: Sequence[torch.Tensor]
) -> list[np.ndarray]:
    """XᵀX over all windows, float64, of the inputs of each group's first matrix in one layer."""
    moments: dict[int, torch.Tensor] = {}

    def add(index: int) -> Callable[[torch.Tensor, dict[str, Any]], None]:
        def use(x: torch.Tensor, kwargs: dict[str, Any]) -> None:
            rows = x.reshape(-1, x.shape[-1])
            product = (rows.T @ rows).double()
            moments[index] = moments[index] + product if index in moments else product

        return use

    with contextlib.ExitStack() as hooks:
        for index, group in enumerate(groups):
            module = next(iter(stack.matrices(number, group).values()))
            hooks.enter_context(_capture(module, add(index)))
        for _ in stack.run(number, states):
            pass
    return [moments[index].numpy() for index in range(len(groups))]


Choose = Callable[[str], Sequence[QuantizationOptions]]
"""The settings for a matrix by its name in the checkpoint; the model goes on with the first. Empty: it stays float."""


def quantize_layers(
    runtime: TorchRuntime,
    windows: Sequence[Sequence[int]],
    choose: Choose,
    *,
    feedback: FeedbackOptions | None = None,
    work: Path | str | None = None,
    threads: int | None = None,
    progress: Progress = silent,
) -> dict[str, tuple[QuantizedTensor, ...]]:
    """Quantise the matrices of all layers with error feedback, and leave the result in the runtime's model.

    Returns the tensors by name, one for each of the settings that `choose` gave. `work` is a folder where
    finished layers are kept: a later call takes them over as long as weights, text, settings and everything
    before that layer are the same, and writes the same bytes. A damaged or foreign file there is made anew.
    Matrices of one layer are quantised in `threads` (default: PyTorch's) at a time, each in one thread, so
    that the result doesn't depend on their number. Raises `InputError` where the model has no layers that
    this module knows.
    """
    import torch

    feedback = feedback or FeedbackOptions()
    stack = LayerStack(runtime, windows)
    states: list[torch.Tensor] = stack.states
    key = _first_key(runtime, states, feedback)
    found: dict[str, tuple[QuantizedTensor, ...]] = {}
    total = len(stack.layers)
    for number in range(total):
        progress("quantise", number, total)
        matrices = _layer_matrices(stack, number)
        settings = {name: tuple(choose(name)) for group in matrices for name in group}
        key = _layer_key(key, stack.layers[number], settings)
        file = None if work is None else Path(work) / f"layer-{number:03d}.safetensors"
        done = _read_layer(file, key, settings)
        if done is None:
            done = _quantize_layer(stack, number, matrices, settings, feedback, states, threads)
            if file is not None and not _write_layer(file, key, done):
                work = None
        for group in matrices:
            for name, module in group.items():
                if done[name]:
                    module.weight.data = torch.from_numpy(done[name][0].dequantize())
        found.update(done)
        if number + 1 < total:
            states = list(stack.run(number, states))
    progress("quantise", total, total)
    return found


def _layer_matrices(stack: LayerStack, number: int) -> list[dict[str, Any]]:
    """The matrices of a layer by their names in the checkpoint, group by group."""
    groups = [stack.matrices(number, group) for _, group in GROUPS]
    if not all(groups):
        kinds = sorted(name for name, m in stack.layers[number].named_modules() if hasattr(m, "in_features"))
        raise InputError(
            f"error feedback knows layers with {', '.join(n for _, g in GROUPS for n in g)}; layer {number} has "
            f"{', '.join(kinds)}."
        )
    return [{f"model.layers.{number}.{n}.weight": module for n, module in g.items()} for g in groups]


def _quantize_layer(
    stack: LayerStack,
    number: int,
    matrices: Sequence[dict[str, Any]],
    settings: Mapping[str, tuple[QuantizationOptions, ...]],
    feedback: FeedbackOptions,
    states: Sequence[torch.Tensor],
    threads: int | None,
) -> dict[str, tuple[QuantizedTensor, ...]]:
    moments = input_moments(stack, number, [group for _, group in GROUPS], states)
    jobs = [
        (name, module.weight.detach().float().numpy(), moment, options)
        for group, moment in zip(matrices, moments, strict=True)
        for name, module in group.items()
        for options in settings[name]
    ]
    jobs.sort(
        key=lambda job: -job[1].size * job[1].shape[1]
    )  # the longest first, so that threads end together
    results = in_threads(lambda job: quantize_with_feedback(job[1], job[2], job[3], feedback), jobs, threads)
    by_job = {(job[0], job[3]): tensor for job, tensor in zip(jobs, results, strict=True)}
    return {name: tuple(by_job[name, options] for options in chosen) for name, chosen in settings.items()}


def in_threads(work: Callable[[Any], Any], jobs: Sequence[Any], threads: int | None = None) -> list[Any]:
    """`work` of each job, several at a time, PyTorch with one thread in each: sums have one order on any machine."""
    import torch

    kept = torch.get_num_threads()

    def alone(job: Any) -> Any:
        torch.set_num_threads(1)
        return work(job)

    try:
        with ThreadPoolExecutor(threads or kept) as pool:
            return list(pool.map(alone, jobs))
    finally:
        torch.set_num_threads(kept)


def _first_key(runtime: TorchRuntime, states: Sequence[torch.Tensor], feedback: FeedbackOptions) -> str:
    """What the first layer's result depends on, besides the layer: its inputs, the config and the method."""
    import torch

    digest = hashlib.sha256()
    about = {"pit-deploy": version("pit-deploy"), "feedback": asdict(feedback), "torch": torch.__version__}
    digest.update(json.dumps([about, runtime.model.config.to_dict()], sort_keys=True, default=str).encode())
    for state in states:
        digest.update(state.numpy().tobytes())
    return digest.hexdigest()


def _layer_key(before: str, layer: Any, settings: Mapping[str, tuple[QuantizationOptions, ...]]) -> str:
    digest = hashlib.sha256(before.encode())
    chosen = {name: [asdict(options) for options in several] for name, several in sorted(settings.items())}
    digest.update(json.dumps(chosen).encode())
    for name, value in sorted(layer.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.float().numpy().tobytes())
    return digest.hexdigest()


def _write_layer(file: Path, key: str, done: Mapping[str, tuple[QuantizedTensor, ...]]) -> bool:
    """Keep a finished layer; False where the folder cannot be written, which costs only an interrupted call's time."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays = {}
    for name, tensors in done.items():
        for index, tensor in enumerate(tensors):
            arrays[f"{name}|{index}|codes"] = tensor.codes
            arrays[f"{name}|{index}|scales"] = tensor.scales
            arrays[f"{name}|{index}|columns"] = np.array([tensor.columns])
            if tensor.zero_points is not None:
                arrays[f"{name}|{index}|zero_points"] = tensor.zero_points
    try:
        with atomic_output(file, overwrite=True, directory=False) as partial:
            save_file(arrays, partial, metadata={"key": key})
    except (InputError, OSError, SafetensorError):
        return False
    return True


def _read_layer(
    file: Path | None, key: str, settings: Mapping[str, tuple[QuantizationOptions, ...]]
) -> dict[str, tuple[QuantizedTensor, ...]] | None:
    """What `_write_layer` wrote, or None where there is nothing of use."""
    from safetensors import SafetensorError, safe_open

    if file is None or not file.is_file():
        return None
    try:
        with safe_open(file, "numpy") as opened:
            if (opened.metadata() or {}).get("key") != key:
                return None
            there = set(opened.keys())

            def read(name: str, index: int, options: QuantizationOptions) -> QuantizedTensor:
                prefix = f"{name}|{index}|"
                codes, scales = (opened.get_tensor(prefix + part) for part in ("codes", "scales"))
                points = prefix + "zero_points"
                zero_points = opened.get_tensor(points) if points in there else None
                columns = int(opened.get_tensor(prefix + "columns")[0])
                block = options.block_size_for(columns)
                return QuantizedTensor(codes, scales, zero_points, options.bits, block, columns)

            return {
                name: tuple(read(name, index, options) for index, options in enumerate(several))
                for name, several in settings.items()
            }
    except (SafetensorError, InputError, OSError, ValueError):
        return None


def _keep_others(others: dict[str, Any]) -> Callable[[Any, dict[str, Any]], None]:
    return lambda _, kwargs: others.update(kwargs)


class _Stop(Exception):
    pass


def _stop(state: torch.Tensor, kwargs: dict[str, Any]) -> None:
    raise _Stop


@contextlib.contextmanager
def _capture(module: Any, use: Callable[[Any, dict[str, Any]], None]) -> Iterator[None]:
    """Call `use` with the first input and the other arguments of a module at each call."""

    def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = {k: v for k, v in kwargs.items() if k != "hidden_states"}
        use(args[0] if args else kwargs["hidden_states"], others)

    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
