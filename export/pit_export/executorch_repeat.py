"""Lower the first and the last layer, and repeat what lies between them for all the others.

Tracing, decomposing and partitioning take seconds a layer, over and over for graphs that are the same. Between the
attention of one layer and that of the next an XNNPACK program has one delegate, and all of these have one structure.
So a decoder of two layers is lowered, and its unit

    cache updates, attention, delegate (the rest of this layer, the projections of the next)

is copied into the graph for every layer between, with that layer's cache and with a delegate that is serialised from
that layer's constants. `NotRegularError` says that a program has no such unit; it is then lowered whole. A test
compares both: their outputs are equal bit for bit.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx import Node

from pit_deploy.decoder import Decoder

CACHES = ("key_cache", "value_cache")
RESIDUAL = "residual"

Serialise = Callable[[ExportedProgram], Any]
"""From a delegate's program to what its backend makes of it (executorch's `PreprocessResult`)."""


class NotRegularError(Exception):
    """The program has no unit that could be repeated."""


def is_regular(decoder: Decoder) -> bool:
    """Whether a program of the last position's logits has more than two layers, which differ in their values only."""
    layers = [
        [(name, value.dtype, value.shape) for name, value in tensors_of(layer).items()]
        for layer in decoder.layers
    ]
    same = all(layer == layers[0] for layer in layers) and len(decoder.windows) == 1
    return decoder.last_only and same and len(layers) > 2


def ends_of(decoder: Decoder) -> Decoder:
    """The same decoder with its first and last layer alone; modules are shared, not copied."""
    short = copy.copy(decoder)
    short._modules = dict(decoder._modules)
    short.layers = nn.ModuleList([decoder.layers[0], decoder.layers[-1]])
    return short


def tensors_of(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a layer by name; quantised ones as the tensors that they consist of."""
    found = {}
    for name, value in (*layer.named_parameters(), *layer.named_buffers()):
        parts = getattr(value, "tensor_data_names", None)
        if parts is None:
            found[name] = value
        else:
            found |= {f"{name}.{part}": getattr(value, part) for part in parts}
    return found


def repeat_layers(program: ExportedProgram, decoder: Decoder, serialise: Serialise) -> None:
    """Make of the lowered program of `ends_of(decoder)` that of `decoder`, in place.

    Raises `NotRegularError` before anything is changed.
    """
    layers = [tensors_of(layer) for layer in decoder.layers]
    unit = _Unit(program, layers, serialise)
    unit.replace_first()
    for number in range(1, len(layers) - 1):
        unit.append(number)
    unit.join()


class _Unit:
    """The part of a program of two layers that is repeated."""

    def __init__(
        self, program: ExportedProgram, layers: Sequence[Mapping[str, Tensor]], serialise: Serialise
    ) -> None:
        self._program, self._layers, self._serialise = program, layers, serialise
        self._module, self._graph = program.graph_module, program.graph
        nodes = list(self._graph.nodes)
        delegates = [node for node in nodes if _is_delegate(node)]
        if len(delegates) != 4:  # before the first attention, between the two, after the second, the head
            raise NotRegularError(f"{len(delegates)} delegates instead of 4")
        first, self._delegate, last = delegates[:3]
        inside = _reached([self._delegate], _inputs) & _reached([first], _users)
        results = [node for node in nodes if _is_result_of(node, self._delegate)]
        taken = [node for node in nodes if _is_result_of(node, first)]
        self._nodes = [node for node in nodes if node in inside and node not in (first, *taken)]
        following = [node for node in nodes if node in _reached([last], _inputs) & _reached(results, _users)]
        self._results = self._roles(results, following)
        self._given = self._roles(taken, self._nodes)
        self._given[RESIDUAL] = self._residual()
        if self._given.keys() != self._results.keys():
            raise NotRegularError(f"a layer takes {sorted(self._given)} and gives {sorted(self._results)}")
        self._nodes += results
        self._caches = [
            node
            for node in dict.fromkeys(n for m in self._nodes for n in m.all_input_nodes)
            if self._cache(node)
        ]
        if sorted(self._cache(node) for node in self._caches) != sorted(CACHES):
            raise NotRegularError(f"a layer has {len(self._caches)} caches")
        self._users = {role: list(node.users) for role, node in self._results.items()}
        order = {node: number for number, node in enumerate(nodes)}
        self._end = max(self._nodes, key=order.__getitem__)
        if any(order[user] < order[self._end] for users in self._users.values() for user in users):
            raise NotRegularError("the layers of the graph overlap")
        self._attribute = self._delegate.args[0]
        assert isinstance(self._attribute, Node)
        self._lowered = getattr(self._module, str(self._attribute.target))
        self._places = self._constant_places()
        self._current = dict(self._results)

    def replace_first(self) -> None:
        """Give the unit's own delegate the second layer behind the first: it was lowered with the last one there."""
        assert isinstance(self._attribute, Node)
        setattr(self._module, str(self._attribute.target), self._lowered_for(0))

    def append(self, number: int) -> None:
        """Copy the unit behind the last copy, for the attention of layer `number` and what follows it."""
        mapping = {node: self._current[role] for role, node in self._given.items()}
        mapping |= {node: self._new_cache(node, number) for node in self._caches}
        name = f"lowered_module_of_layer_{number}"
        self._module.add_module(name, self._lowered_for(number))
        with self._graph.inserting_after(self._end):
            attribute = self._graph.get_attr(name)
        assert isinstance(self._attribute, Node)
        attribute.meta = dict(self._attribute.meta)
        mapping[self._attribute] = self._end = attribute
        for node in self._nodes:
            with self._graph.inserting_after(self._end):
                made = self._graph.node_copy(node, lambda n: mapping.get(n, n))
            made.meta = dict(node.meta)
            mapping[node] = self._end = made
        self._current = {role: mapping[node] for role, node in self._results.items()}
        self._new_mutations(mapping)

    def join(self) -> None:
        """Let what follows the unit follow its last copy."""
        for role, node in self._results.items():
            for user in self._users[role]:
                user.replace_input_with(node, self._current[role])
        self._graph.lint()
        self._module.recompile()

    def _roles(self, values: Iterable[Node], users: Sequence[Node]) -> dict[str, Node]:
        """What each value is to the attention or the delegate that it goes into."""
        found: dict[str, Node] = {}
        for value in values:
            user = next((u for u in users if value in u.all_input_nodes), None)
            if user is None:
                raise NotRegularError(f"nothing uses {value.name}")
            caches = [name for node in user.all_input_nodes if (name := self._cache(node))]
            role = RESIDUAL if _is_delegate(user) else caches[0] if len(caches) == 1 else str(user.target)
            if role in found:
                raise NotRegularError(f"{value.name} and {found[role].name} are both {role}")
            found[role] = value
        return found

    def _residual(self) -> Node:
        """What the unit adds its own sum to: the only input of its delegate in the shape of the result."""
        shape = self._results[RESIDUAL].meta["val"].shape if RESIDUAL in self._results else None
        inputs = [n for n in self._delegate.all_input_nodes if n not in self._nodes and n.op != "get_attr"]
        found = [n for n in inputs if isinstance(n.meta.get("val"), Tensor) and n.meta["val"].shape == shape]
        if len(found) != 1:
            raise NotRegularError(f"{len(found)} inputs of a delegate could be the residual stream")
        return found[0]

    def _cache(self, node: Node) -> str:
        """`key_cache` or `value_cache` for the placeholder of one, else nothing."""
        target = self._program.graph_signature.inputs_to_buffers.get(node.name, "")
        name = target.rsplit(".", 1)[-1]
        return name if name in CACHES else ""

    def _constant_places(self) -> dict[str, tuple[int, str]]:
        """For each constant of the delegate: 0 or 1 for this layer or the next, and its name there."""
        known = {
            value.data_ptr(): (place, name)
            for place, layer in enumerate((self._layers[0], self._layers[-1]))
            for name, value in layer.items()
        }
        places = {}
        for target, value in self._lowered.original_module.state_dict.items():
            if value.data_ptr() not in known:
                raise NotRegularError(f"{target} is no tensor of a layer")
            places[target] = known[value.data_ptr()]
        return places

    def _lowered_for(self, number: int) -> Any:
        """The delegate between the attention of layer `number` and that of the next."""
        from executorch.exir.lowered_backend_module import LoweredBackendModule

        program = copy.copy(self._lowered.original_module)
        values = dict(program.state_dict)
        for target, (place, name) in self._places.items():
            value = self._layers[number + place][name]
            is_parameter = isinstance(values[target], nn.Parameter)
            values[target] = nn.Parameter(value, requires_grad=False) if is_parameter else value
        program._state_dict = values
        result = self._serialise(program)
        lowered = LoweredBackendModule(
            edge_program=program,
            backend_id=self._lowered.backend_id,
            processed_bytes=result.processed_bytes,
            compile_specs=self._lowered.compile_specs,
            named_data_store_output=result.data_store_output,
        )
        lowered.meta = {"debug_handle_map": result.debug_handle_map}
        return lowered

    def _new_cache(self, cache: Node, number: int) -> Node:
        """A cache of its own for a copy: an input of the graph, and a buffer of zeros."""
        signature = self._program.graph_signature
        target = signature.inputs_to_buffers[cache.name]
        name = f"between_{number}_{self._cache(cache)}"
        with self._graph.inserting_after(cache):
            made = self._graph.placeholder(name)
        made.meta = dict(cache.meta)
        at = next(n for n, spec in enumerate(signature.input_specs) if spec.target == target)
        signature.input_specs.insert(
            at + 1, InputSpec(InputKind.BUFFER, TensorArgument(made.name), made.name, persistent=True)
        )
        self._program.state_dict[made.name] = torch.zeros_like(self._program.state_dict[target])
        return made

    def _new_mutations(self, mapping: Mapping[Node, Node]) -> None:
        """Declare that a copy changes its cache as the unit changes its own."""
        signature = self._program.graph_signature
        output = self._graph.output_node()
        values = list(output.args[0])  # type: ignore[arg-type]
        for cache in self._caches:
            target = signature.inputs_to_buffers[cache.name]
            at = next(
                n
                for n, spec in enumerate(signature.output_specs)
                if spec.kind == OutputKind.BUFFER_MUTATION and spec.target == target
            )
            made = mapping[values[at]]  # type: ignore[index]
            values.insert(at + 1, made)
            spec = OutputSpec(
                OutputKind.BUFFER_MUTATION, TensorArgument(made.name), target=mapping[cache].name
            )
            signature.output_specs.insert(at + 1, spec)
        output.args = (tuple(values),)


def _is_delegate(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "executorch_call_delegate"


def _is_result_of(node: Node, delegate: Node) -> bool:
    return node.target is operator.getitem and node.args[0] is delegate


def _inputs(node: Node) -> Iterable[Node]:
    return node.all_input_nodes


def _users(node: Node) -> Iterable[Node]:
    return node.users


def _reached(start: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes of `start` and all that can be reached from them."""
    found, waiting = set[Node](), list(start)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += following(node)
    return found
