"""From a decoder in PyTorch to the bytes of a .pte: export, lower to a profile's backend, plan memory, write."""

from __future__ import annotations

import gc
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from pit_deploy.decoder import Decoder, Pieces
from pit_deploy.runtimes.executorch_package import without_output
from pit_export.executorch_passes import shared_passes
from pit_export.executorch_pieces import CUSTOM, LINEAR, CustomForward, Forward, LinearForward

_XNNPACK = "XnnpackBackend"
_TAG = "delegation_tag"
EXAMPLE_TOKENS = 7
"""Length that is traced; it stands for all."""
_DATA_MOVING = ("getitem", "alloc", "view", "executorch_call_delegate")


@dataclass(frozen=True)
class Profile:
    """How a decoder is lowered."""

    pieces: Pieces
    forward: Callable[[Decoder], nn.Module]
    partitioners: Callable[[], list[Any]] = list
    custom_operators: bool = False
    """Whether it needs the kernels of `extension/llm/custom_ops`, which a small runtime lacks."""
    backend: str | None = None
    """Name of the delegate at run time."""
    free_length: bool = True
    """Whether S is free; otherwise it is 1, and a prefill is that many steps."""


def _xnnpack() -> list[Any]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

    # One partitioner for floats and quantised layers alike: two would cut each layer into a dozen delegates.
    return [XnnpackPartitioner()]


def _coreml() -> list[Any]:
    import coremltools as ct
    from executorch.backends.apple.coreml.compiler import CoreMLBackend
    from executorch.backends.apple.coreml.partition import CoreMLPartitioner

    # In float16, its default, the square in a norm overflows, and the logits are wrong without a sign of it.
    specs = CoreMLBackend.generate_compile_specs(
        compute_precision=ct.precision.FLOAT32, minimum_deployment_target=ct.target.iOS18
    )
    return [CoreMLPartitioner(compile_specs=specs)]


def _vulkan() -> list[Any]:
    from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner

    class TensorPartitioner(VulkanPartitioner):
        """Vulkan's without delegates of sizes alone, which it proposes and then cannot lower."""

        def partition(self, exported_program: ExportedProgram) -> Any:
            result = super().partition(exported_program)
            nodes: dict[str, list[Any]] = {}
            for node in exported_program.graph.nodes:
                if node.op == "call_function" and _TAG in node.meta:
                    nodes.setdefault(node.meta[_TAG], []).append(node)
            for tag, members in nodes.items():
                if not any(isinstance(node.meta.get("val"), torch.Tensor) for node in members):
                    for node in members:
                        del node.meta[_TAG]
                    result.partition_tags.pop(tag)
            return result

    return [TensorPartitioner({"require_dynamic_shapes": True})]


def _mps() -> list[Any]:
    from executorch.backends.apple.mps.partition import MPSPartitioner
    from executorch.exir.backend.compile_spec_schema import CompileSpec

    return [MPSPartitioner([CompileSpec("use_fp16", bytes([False]))])]


PROFILES: Mapping[str, Profile] = {
    "xnnpack": Profile(CUSTOM, CustomForward, _xnnpack, custom_operators=True, backend=_XNNPACK),
    "portable": Profile(LINEAR, LinearForward, _xnnpack, backend=_XNNPACK),
    "coreml": Profile(Pieces(), Forward, _coreml, backend="CoreMLBackend"),
    "vulkan": Profile(Pieces(), Forward, _vulkan, backend="VulkanBackend"),
    "mps": Profile(Pieces(), Forward, _mps, backend="MPSBackend", free_length=False),
}


@dataclass
class Lowered:
    """What was written: operators by number of calls, delegates apart."""

    delegates: int
    leftover: dict[str, int] = field(default_factory=dict)
    """Operators that no delegate took."""


def lower(
    decoder: Decoder,
    profile: Profile,
    metadata: Mapping[str, Any],
    path: Path,
    *,
    shared: bool = True,
) -> Lowered:
    """Write `decoder` to `path` as one method `forward(tokens [1, S], input_pos [1])` with a free S.

    `metadata` becomes methods that return constants. `shared` False lowers every delegate on its own (see
    `executorch_passes`): the result is the same, and it takes many times as long.
    """
    import_operators(profile)
    from executorch.exir import ExecutorchBackendConfig
    from executorch.exir.passes import MemoryPlanningPass
    from executorch.exir.passes.sym_shape_eval_pass import ConstraintBasedSymShapeEvalPass

    with _quiet(), _no_collector(), torch.no_grad():
        with shared_passes(enabled=shared and profile.backend == _XNNPACK):
            edge = _delegated(decoder, profile, metadata)
        written = edge.to_executorch(
            ExecutorchBackendConfig(
                extract_delegate_segments=True,
                do_quant_fusion_and_const_prop=True,
                memory_planning_pass=MemoryPlanningPass(alloc_graph_input=False),
                sym_shape_eval_pass=ConstraintBasedSymShapeEvalPass(),
            )
        )
    with path.open("wb") as stream:
        written.write_to_file(stream)
    return _operators(written.exported_program())


def _delegated(decoder: Decoder, profile: Profile, metadata: Mapping[str, Any]) -> Any:
    """The program in ExecuTorch's edge dialect, with the profile's delegates: an `EdgeProgramManager`."""
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    return to_edge_transform_and_lower(
        _exported(profile.forward(decoder).eval(), decoder.context_length if profile.free_length else 1),
        partitioner=profile.partitioners(),
        constant_methods=dict(metadata),
        compile_config=EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True),
    )


def import_operators(profile: Profile) -> None:
    """Register the operators that a profile's graph or kernels need."""
    with without_output():
        import executorch.kernels.quantized

        if profile.custom_operators:
            import executorch.extension.llm.custom_ops.custom_ops  # noqa: F401


def _exported(module: nn.Module, longest: int) -> ExportedProgram:
    """`longest` is the most that S may be."""
    tokens = torch.zeros(1, min(EXAMPLE_TOKENS, longest), dtype=torch.int64)
    example = (tokens, torch.zeros(1, dtype=torch.int64))
    if longest == 1:
        return torch.export.export(module, example)
    return torch.export.export(module, example, dynamic_shapes=({1: Dim("length", min=1, max=longest)}, None))


def _operators(program: ExportedProgram) -> Lowered:
    counts: Counter[str] = Counter()
    for node in program.graph.nodes:
        if node.op == "call_function":
            name = getattr(node.target, "name", None)
            counts[name() if callable(name) else getattr(node.target, "__name__", str(node.target))] += 1
    delegates = counts.pop("executorch_call_delegate", 0)
    return Lowered(
        delegates, {name: n for name, n in sorted(counts.items()) if name.split(".")[0] not in _DATA_MOVING}
    )


@contextmanager
def _no_collector() -> Iterator[None]:
    """Without Python's search for rings of references: millions of small objects live through a lowering, and the
    search goes over all of them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the remarks of libraries about themselves; errors are raised all the same.

    The partitioner of `mps` prints the whole graph, which would stand before what `--json` writes.
    """
    with (
        Path(os.devnull).open("w") as nowhere,
        redirect_stdout(nowhere),
        warnings.catch_warnings(),
        without_output(),
    ):
        warnings.simplefilter("ignore")
        yield
