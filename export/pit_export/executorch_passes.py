"""Lower delegates of one structure once: the same bytes out, in a fraction of the time.

XNNPACK's pass manager traces a delegate's graph anew for each of its passes, with free shapes, and a decoder has a
delegate of one and the same structure for each layer. While `shared_passes` is open the passes run on the first of
them; the others take over its transformed graph with their own constants, and are then serialised as always. What
cannot be taken over (another structure, constants that a pass computed) goes through the passes as before.

The seam is `XNNPACKPassManager` in `executorch.backends.xnnpack.xnnpack_preprocess`: an ExecuTorch whose lowering is
fast needs nothing of this file, and leaving `shared_passes` out changes no byte of the result.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

_HANDLE = "debug_handle"
_CONSTANTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@contextmanager
def shared_passes(*, enabled: bool = True) -> Iterator[PassCounts]:
    """While open, delegates of one structure go through XNNPACK's passes once."""
    if not enabled:
        yield PassCounts()
        return
    from executorch.backends.xnnpack import xnnpack_preprocess

    original = xnnpack_preprocess.XNNPACKPassManager
    counts, templates = PassCounts(), dict[Hashable, _Template | None]()

    class SharedPassManager(original):  # type: ignore[valid-type, misc]
        """XNNPACK's pass manager with a memory."""

        def transform(self) -> ExportedProgram:
            program = self.exported_program
            key = (tuple(p.__name__ for p in self.passes), structure(program))
            template = templates.get(key)
            if template is not None:
                counts.taken_over += 1
                return template.with_constants_of(program)
            counts.transformed += 1
            # Noted before the passes: some of them change the graph where it is.
            handles, inputs = _handles(program), [id(value) for _, value in _constants(program)]
            transformed: ExportedProgram = super().transform()
            if key not in templates:
                templates[key] = _Template.of(handles, inputs, transformed)
            return transformed

    xnnpack_preprocess.XNNPACKPassManager = SharedPassManager
    try:
        yield counts
    finally:
        xnnpack_preprocess.XNNPACKPassManager = original


class PassCounts:
    """How many delegates went through the passes, and how many took the result of another over."""

    transformed = 0
    taken_over = 0


class _Template:
    """A transformed program, and for each of its constants the place of the same tensor among the inputs."""

    def __init__(self, handles: list[Any], transformed: ExportedProgram, places: dict[str, int]) -> None:
        self._handles, self._transformed, self._places = handles, transformed, places
        self._nodes = [(node, node.meta.get(_HANDLE)) for node in transformed.graph.nodes]

    @classmethod
    def of(cls, handles: list[Any], inputs: list[int], transformed: ExportedProgram) -> _Template | None:
        """`handles` of the nodes and `inputs`, the ids of the constants, as they were before the passes.

        None where the passes made a constant of their own, which depends on the values that it was made from.
        """
        places = {}
        for target, value in _constants(transformed):
            if id(value) not in inputs:
                return None
            places[target] = inputs.index(id(value))
        return cls(handles, transformed, places)

    def with_constants_of(self, program: ExportedProgram) -> ExportedProgram:
        """The transformed program for another program of the same structure. The graph itself is shared: it is
        this program's until the next call."""
        handles = dict(zip(self._handles, _handles(program), strict=True))
        for node, handle in self._nodes:
            if handle in handles:
                node.meta[_HANDLE] = handles[handle]
        values = [value for _, value in _constants(program)]
        result = copy.copy(self._transformed)
        known = {target: values[place] for target, place in self._places.items()}
        result._state_dict = {name: known[name] for name in result._state_dict if name in known}
        result._constants = {name: known[name] for name in result._constants if name in known}
        return result


def _handles(program: ExportedProgram) -> list[Any]:
    """The number by which a debugger knows each node; they are written into the delegate."""
    return [node.meta.get(_HANDLE) for node in program.graph.nodes]


def structure(program: ExportedProgram) -> Hashable:
    """All that a program is but the values of its constants: operators, arguments, types, shapes and their order."""
    numbers: dict[Node, int] = {}
    kinds = {spec.arg.name: spec.kind.name for spec in program.graph_signature.input_specs}
    lines: list[Hashable] = []
    for node in program.graph.nodes:
        arguments = _plain((node.args, node.kwargs), numbers)
        name = kinds[node.name] if node.op == "placeholder" else str(node.target)
        lines.append((node.op, name, arguments, _described(node.meta.get("val"))))
        numbers[node] = len(numbers)
    return tuple(lines)


def _constants(program: ExportedProgram) -> Iterator[tuple[str, Any]]:
    """Name and tensor of each constant, in the order of the inputs."""
    for spec in program.graph_signature.input_specs:
        if spec.kind in _CONSTANTS and spec.target is not None:
            held = program.state_dict if spec.target in program.state_dict else program.constants
            yield spec.target, held[spec.target]


def _plain(value: Any, numbers: dict[Node, int]) -> Hashable:
    if isinstance(value, Node):
        return ("node", numbers[value])
    if isinstance(value, (list, tuple)):
        return tuple(_plain(item, numbers) for item in value)
    if isinstance(value, dict):
        return tuple((key, _plain(item, numbers)) for key, item in value.items())
    return f"{type(value).__name__} {value!r}"


def _described(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), str(tuple(value.shape)), str(value.stride()))
    if isinstance(value, (list, tuple)):
        return tuple(_described(item) for item in value)
    return str(value)
