"""Packages written here with coremltools, read from disk by the evaluator."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.manifest import BundleError
from pit_deploy.runtimes.mil_program import MilProgram, looked_up, quiet_coremltools, weights_file

coremltools = quiet_coremltools()
from coremltools.converters.mil.converter import mil_convert  # noqa: E402
from coremltools.converters.mil.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.mil import Function, Placeholder, Program, types  # noqa: E402
from coremltools.converters.mil.mil.program import StateTensorPlaceholder  # noqa: E402

WEIGHT = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float16)
CODES = np.arange(24, dtype=np.int8).reshape(6, 4) % 16 - 8
STATE = StateTensorPlaceholder((3, 2), types.fp16)


def save(path: Path, functions: Mapping[str, tuple[Mapping[str, Any], Callable[..., Any]]]) -> Path:
    """Write functions `name: (inputs, build)`, with no pass of coremltools in between."""
    program = Program()
    for name, (inputs, build) in functions.items():
        with Function(dict(inputs), opset_version=coremltools.target.iOS18) as function:
            outputs = build(**function.inputs)
            function.set_outputs(list(outputs) if isinstance(outputs, tuple) else [outputs])
        program.add_function(name, function)
    program.default_function_name = next(iter(functions))
    program.export_as_multifunction = "main" not in functions
    program.skip_all_passes = True
    mil_convert(
        program,
        convert_from="milinternal",
        convert_to="mlprogram",
        specification_version=9,
        compute_units=coremltools.ComputeUnit.CPU_ONLY,
        skip_model_load=True,
        main_pipeline=coremltools.PassPipeline.EMPTY,
        package_dir=str(path),
    )
    return path


def shared(value: np.ndarray, name: str) -> Any:
    constant = mb.const(val=value, name=name)
    constant.op.weight_id = name
    return constant


def linear(tokens: int) -> tuple[dict[str, Any], Callable[..., Any]]:
    def build(x: Any) -> Any:
        int4 = types.nptype_from_builtin(types.int4)
        scale = shared(np.full((6, 2), 0.125, np.float16), "scale")
        compressed = mb.constexpr_blockwise_shift_scale(
            data=shared(CODES.astype(int4), "codes"), scale=scale, name="w"
        )
        y = mb.linear(x=x, weight=shared(WEIGHT, "weight"), name="y")
        return y, mb.linear(x=x, weight=compressed, name="z")

    return {"x": Placeholder((tokens, 4), dtype=types.fp16)}, build


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("mil") / "a.mlpackage", {"one": linear(1), "many": linear(5)})


def test_functions_share_what_is_decompressed_once(package: Path) -> None:
    program = MilProgram.open(package)
    one, many = program.functions["one"], program.functions["many"]
    for name in ("weight", "w"):
        assert one.constants[name] is many.constants[name]
    assert program.constant_ops == {"const", "constexpr_blockwise_shift_scale"}
    assert program.default_function == "one" and program.specification_version == 9
    x = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float16)
    found = program.run({"x": x}, function="many")
    exact = x.astype(np.float64) @ WEIGHT.T.astype(np.float64)
    np.testing.assert_array_equal(found["y"], exact.astype(np.float32).astype(np.float16).astype(np.float32))
    np.testing.assert_allclose(found["z"], x.astype(np.float32) @ (CODES.T * 0.125), rtol=1e-3, atol=1e-3)
    assert found["y"].dtype == np.float32


def test_rounding_to_the_declared_type_can_be_left_out(package: Path) -> None:
    program = MilProgram.open(package)
    x = np.float32([[0.1, 0.2, 0.3, 0.4]])
    exact = x @ WEIGHT.T.astype(np.float32)
    np.testing.assert_array_equal(program.run({"x": x}, rounding=False)["y"], exact)
    assert np.abs(program.run({"x": x})["y"] - exact).max() > 1e-6
    np.testing.assert_array_equal(MilProgram.open(package, rounding=False).run({"x": x})["y"], exact)


def test_values_in_between_can_be_read_and_replaced(package: Path) -> None:
    program = MilProgram.open(package)
    x, seen = np.ones((1, 4), np.float32), []
    found = program.run({"x": x}, also=["w", "x"], watch=lambda step, given, results: seen.append(step.name))
    assert seen == ["y", "z"]
    np.testing.assert_array_equal(found["w"], CODES * np.float32(0.125))
    np.testing.assert_array_equal(found["x"], x)
    replaced = program.run({"x": x}, given={"y": np.zeros((1, 6))})
    assert not replaced["y"].any() and replaced["z"].any()
    with pytest.raises(PitDeployError, match="no value named nothing"):
        program.run({"x": x}, also=["nothing"])


def test_wrong_calls(package: Path) -> None:
    program = MilProgram.open(package)
    with pytest.raises(InputError, match="no function 'two'; it has many, one"):
        program.run({}, function="two")
    with pytest.raises(InputError, match="takes the inputs x"):
        program.run({"y": np.ones((1, 4))})
    with pytest.raises(PitDeployError, match=r"the op y \(linear\) failed"):
        program.run({"x": np.ones((1, 3), np.float32)})


def two_writes(state: Any, x: Any) -> Any:
    """Read, write, read again; the first reading is used after the write, and so is what was written."""
    first = mb.read_state(input=state)
    written = mb.slice_update(x=first, update=x, begin=[0, 0], end=[1, 2], name="written")
    second = mb.coreml_update_state(state=state, value=written)
    again = mb.slice_update(x=second, update=x, begin=[1, 0], end=[2, 2], name="again")
    third = mb.coreml_update_state(state=state, value=again)
    return mb.add(x=mb.add(x=first, y=second), y=third, name="sum")


def chained(state: Any, x: Any) -> Any:
    value = mb.read_state(input=state)
    for row in range(2):
        value = mb.slice_update(x=value, update=x, begin=[row, 0], end=[row + 1, 2])
        value = mb.coreml_update_state(state=state, value=value)
        part = mb.slice_by_index(x=value, begin=[row, 0], end=[row + 1, 2])
    return mb.add(x=part, y=np.float16(1), name="last")


def test_states_keep_values_and_not_memory(tmp_path: Path) -> None:
    inputs = {"state": STATE, "x": Placeholder((1, 2), dtype=types.fp16)}
    program = MilProgram.open(save(tmp_path / "s.mlpackage", {"main": (inputs, two_writes)}))
    state = program.new_state()
    found = program.run({"x": np.float32([[1, 2]])}, state)
    np.testing.assert_array_equal(found["sum"], [[2, 4], [1, 2], [0, 0]])
    np.testing.assert_array_equal(state["state"], [[1, 2], [1, 2], [0, 0]])
    again = program.run({"x": np.float32([[5, 5]])}, state)
    np.testing.assert_array_equal(again["sum"], [[1 + 5 + 5, 2 + 5 + 5], [1 + 1 + 5, 2 + 2 + 5], [0, 0]])
    with pytest.raises(InputError, match="has the states state; make them with new_state"):
        program.run({"x": np.float32([[1, 2]])})


def test_a_chain_of_writes_copies_nothing(tmp_path: Path) -> None:
    inputs = {"state": STATE, "x": Placeholder((1, 2), dtype=types.fp16)}
    program = MilProgram.open(save(tmp_path / "s.mlpackage", {"main": (inputs, chained)}))
    steps = program.functions["main"].steps
    assert [s.in_place for s in steps if s.op_type in ("slice_update", "write_state")] == [True] * 4
    state = program.new_state()
    memory = state["state"]
    found = program.run({"x": np.float32([[1, 2]])}, state)
    np.testing.assert_array_equal(found["last"], [[2, 3]])
    assert state["state"] is memory
    np.testing.assert_array_equal(memory, [[1, 2], [1, 2], [0, 0]])


def test_what_is_dropped_is_not_written(tmp_path: Path) -> None:
    """A `slice_update` whose result goes nowhere leaves the state alone."""

    def build(state: Any, x: Any) -> Any:
        mb.slice_update(x=mb.read_state(input=state), update=x, begin=[0, 0], end=[1, 2])
        return mb.add(x=x, y=np.float16(1), name="out")

    inputs = {"state": STATE, "x": Placeholder((1, 2), dtype=types.fp16)}
    program = MilProgram.open(save(tmp_path / "s.mlpackage", {"main": (inputs, build)}))
    state = program.new_state()
    program.run({"x": np.float32([[1, 2]])}, state)
    assert not state["state"].any()
    assert program.functions["main"].written_states() == set()


def test_every_unknown_op_is_named_when_opened(tmp_path: Path) -> None:
    def build(x: Any) -> Any:
        y = mb.resize_nearest_neighbor(x=x, target_size_height=4, target_size_width=4)
        return mb.max_pool(x=y, kernel_sizes=[2, 2], pad_type="valid", name="out")

    inputs = {"x": Placeholder((1, 1, 2, 2), dtype=types.fp16)}
    save(tmp_path / "u.mlpackage", {"main": (inputs, build)})
    with pytest.raises(
        InputError, match=r"does not know: max_pool, resize_nearest_neighbor; check this package on a Mac"
    ):
        MilProgram.open(tmp_path / "u.mlpackage")


def test_ops_without_an_implementation_here_are_inferred(tmp_path: Path) -> None:
    inputs = {"x": Placeholder((1, 4), dtype=types.fp16)}
    save(
        tmp_path / "f.mlpackage",
        {
            "main": (
                inputs,
                lambda x: mb.floor(x=mb.clip(x=x, alpha=np.float16(-1), beta=np.float16(2)), name="out"),
            )
        },
    )
    program = MilProgram.open(tmp_path / "f.mlpackage")
    found = program.run({"x": np.float32([[-3.5, -0.5, 0.5, 7.5]])})
    np.testing.assert_array_equal(found["out"], [[-1, -1, 0, 2]])


def test_palettes_are_looked_up_as_coremltools_does() -> None:
    rng = np.random.default_rng(2)
    for shape, groups in (((6, 4), (3, 1)), ((6, 4), (2, 2)), ((4, 3, 1, 1), (4, 1, 1, 1)), ((8,), (1,))):
        indices = rng.integers(0, 16, shape).astype(types.nptype_from_builtin(types.uint4))
        lut = rng.normal(size=(*groups, 16, 1)).astype(np.float16)
        with Function({}, opset_version=coremltools.target.iOS18):
            made = mb.constexpr_lut_to_dense(indices=indices, lut=lut)
            expected = made.op.materialized_val_inference()
        np.testing.assert_array_equal(looked_up(np.asarray(indices, np.uint8), lut), expected)


def test_damaged_packages(package: Path, tmp_path: Path) -> None:
    shutil.copytree(package, tmp_path / "cut.mlpackage")
    file = weights_file(tmp_path / "cut.mlpackage")
    file.write_bytes(file.read_bytes()[:64])
    with pytest.raises(BundleError, match=r"cut.mlpackage: a constant cannot be read"):
        MilProgram.open(tmp_path / "cut.mlpackage")
    with pytest.raises(BundleError, match="cannot be read as a Core ML package"):
        MilProgram.open(tmp_path / "none.mlpackage")
    shutil.copytree(package, tmp_path / "text.mlpackage")
    model = next((tmp_path / "text.mlpackage").rglob("model.mlmodel"))
    model.write_bytes(b"not a model" * 9)
    with pytest.raises(BundleError, match="cannot be read as a Core ML package"):
        MilProgram.open(tmp_path / "text.mlpackage")
