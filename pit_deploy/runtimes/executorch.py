"""ExecuTorch's Python runtime, over the program that `export --to executorch` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.manifest import BundleError, Manifest
from pit_deploy.runtimes.base import check_room
from pit_deploy.runtimes.executorch_package import import_executorch, without_output
from pit_deploy.runtimes.onnxruntime import resident_bytes

METHOD = "forward"
_PORTABLE = "executorch.extension.pybindings.portable_lib"
_DELEGATES = {"coreml": "CoreMLBackend", "mps": "MPSBackend", "vulkan": "VulkanBackend"}
"""What a program of a profile needs and not every build of ExecuTorch has."""


class ExecutorchRuntime:
    """One program and one sequence; implements `Runtime`, and gives the logits of every position step by step.

    The program keeps its cache itself. `threads` None leaves their number to ExecuTorch; it holds for the whole
    process. `load_rss_bytes` is what opening the program added to the process's resident memory, None where the
    system does not tell. Raises `InputError` where ExecuTorch cannot open the program.
    """

    name = "executorch"

    def __init__(
        self, model_path: Path | str, context_length: int, vocab_size: int, threads: int | None = None
    ) -> None:
        self.model_path, self.context_length, self.vocab_size = Path(model_path), context_length, vocab_size
        before = resident_bytes()
        self._module = open_program(self.model_path, threads)
        self._longest = list(self._module.method_meta(METHOD).input_tensor_meta(0).sizes())[-1]
        after = resident_bytes()
        self.load_rss_bytes = None if before is None or after is None else after - before
        self._position = 0

    @classmethod
    def open(cls, directory: Path | str, manifest: Manifest, threads: int | None = None) -> ExecutorchRuntime:
        """Open the program of a bundle. Raises `BundleError` where it is not what its manifest says, and `InputError`
        where its profile needs a delegate that is not there."""
        path = Path(directory) / manifest.model_file
        check_delegate(path, manifest.profile)
        make = FullExecutorchRuntime if manifest.hidden_states else ExecutorchRuntime
        runtime = make(path, manifest.context_length, manifest.vocab_size, threads)
        check_program(runtime._module, path, manifest)
        return runtime

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return self._position

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Append `ids` in one pass (a program of a fixed length: in several) and return the logits of the last
        position, [vocab_size]."""
        check_room(self, ids)
        for outputs in self._passes(ids):
            logits = outputs[0][0, -1]  # valid until the next pass
        return logits.copy()

    def decode(self, id: int) -> np.ndarray:
        """Append one id and return its logits, [vocab_size]."""
        return self.prefill([id])

    def reset(self) -> None:
        """Empty the cache: what lies past the position is never read."""
        self._position = 0

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of `ids` from an empty cache, [tokens, vocab_size], step by step; leaves it
        empty."""
        self.reset()
        check_room(self, ids)
        logits = np.stack([self.decode(id) for id in ids])
        self.reset()
        return logits

    def _passes(self, ids: Sequence[int]) -> Iterator[list[np.ndarray]]:
        """The outputs of each pass over `ids`, which goes into the cache with it."""
        for start in range(0, len(ids), self._longest):
            part = ids[start : start + self._longest]
            outputs = self._outputs(part)
            self._position += len(part)
            yield outputs

    def _outputs(self, ids: Sequence[int]) -> list[np.ndarray]:
        import torch

        inputs = (torch.tensor([list(ids)]), torch.tensor([self._position]))
        try:
            outputs = self._module.run_method(METHOD, inputs, clone_outputs=False)
        except RuntimeError as error:
            raise PitDeployError(
                f"ExecuTorch failed while running {self.model_path}: {_reason(error)}; check the bundle with "
                f"pit-deploy verify, or export it again."
            ) from error
        return [output.numpy() for output in outputs]


class FullExecutorchRuntime(ExecutorchRuntime):
    """The same over a program that gives all logits and its hidden states; implements `FullRuntime`."""

    def all_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Logits of every position of `ids` from an empty cache, [tokens, vocab_size]; leaves it empty."""
        return self.hidden_states(ids)[1]

    def hidden_states(self, ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """From an empty cache, which stays empty: the residual stream after the embedding and after each
        layer, [num_hidden_layers + 1, tokens, hidden_size], and the logits [tokens, vocab_size]."""
        self.reset()
        check_room(self, ids)
        passes = [(states.copy(), logits[0].copy()) for logits, states in self._passes(ids)]
        self.reset()
        return np.concatenate([p[0] for p in passes], axis=1), np.concatenate([p[1] for p in passes])


def import_kernels() -> Any:
    """ExecuTorch's runtime with the kernels of the LLM extension and of quantised embeddings."""
    portable = import_executorch(_PORTABLE)
    import_executorch("executorch.kernels.quantized")
    import_executorch("executorch.extension.llm.custom_ops.custom_ops")
    return portable


def check_delegate(path: Path, profile: str) -> None:
    """Raise `InputError` where the delegate of a program's profile is not in this ExecuTorch."""
    needed, present = _DELEGATES.get(profile), import_kernels()._get_registered_backend_names()
    if needed is not None and needed not in present:
        raise InputError(
            f"{path} was lowered for {needed}, and ExecuTorch {_version()} on this machine has "
            f"{', '.join(sorted(present))}; run it on a device that has it, or export with --profile xnnpack."
        )


def open_program(path: Path, threads: int | None = None) -> Any:
    """Open a .pte; `threads` holds for the whole process.

    Raises `InputError` where ExecuTorch refuses it.
    """
    portable = import_kernels()
    with without_output():
        if threads is not None:
            portable._unsafe_reset_threadpool(threads)
        portable._threadpool_get_thread_count()  # makes the pool, with its remarks about the processor, now
        try:
            module = portable._load_for_executorch(str(path))
            if METHOD in module.method_names():
                module.method_meta(METHOD)  # a cut file may open, and fail here
        except RuntimeError as error:
            raise InputError(
                f"ExecuTorch {_version()} cannot open {path}: {_reason(error)}; if its files are whole (pit-deploy "
                f"verify), a newer ExecuTorch may be needed."
            ) from error
    return module


def program_metadata(path: Path) -> dict[str, Any]:
    """What a program says of itself, by the names that ExecuTorch's runners use; lists for several numbers."""
    module = open_program(path)
    found: dict[str, Any] = {}
    for name in module.method_names():
        if name != METHOD:
            values = module.run_method(name, ())
            found[name] = values if name == "get_eos_ids" else values[0]
    return found


def check_program(module: Any, path: Path, manifest: Manifest) -> None:
    """Raise `BundleError` where a program is not what its manifest says: sizes, context and end ids."""
    meta = module.method_meta(METHOD)
    logits = list(meta.output_tensor_meta(0).sizes())
    names = module.method_names()
    found: dict[str, Any] = {"vocab_size": logits[-1]}
    said: dict[str, Any] = {"vocab_size": manifest.vocab_size}
    for field, name in (("context_length", "get_max_context_len"), ("end_ids", "get_eos_ids")):
        values = module.run_method(name, ()) if name in names else None
        found[field] = values if field == "end_ids" or values is None else values[0]
        value = getattr(manifest, field)
        said[field] = list(value) if field == "end_ids" else value
    tokens = list(meta.input_tensor_meta(0).sizes())
    length = next(value.shape[-1] for value in manifest.inputs if value.name == "tokens")
    longest = length if isinstance(length, int) else manifest.context_length
    found["the longest input"], said["the longest input"] = tokens[-1], longest
    for field, value in said.items():
        if found[field] != value:
            raise BundleError(
                "bad_value",
                f"{path}: the manifest says {field} {value}, and the program has {found[field]}; export the bundle "
                f"again, or fetch it again from where it came.",
            )


def _version() -> str:
    from importlib.metadata import version

    return version("executorch")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(". ")
