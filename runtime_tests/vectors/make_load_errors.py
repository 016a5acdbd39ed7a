"""Write onnx_load_errors.json: `python runtime_tests/vectors/make_load_errors.py`.

The messages are those of the installed ONNX Runtime for models made here, each with one fault. Two cannot be
provoked at will on every machine and are written as ONNX Runtime's source has them: they carry `recorded` false.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from onnx import TensorProto, helper

HERE = Path(__file__).resolve().parent
UNPROVOKED = (
    ("bad allocation", "std::bad_alloc", "out_of_memory"),
    (
        "an arena that cannot grow",
        "Failed to allocate memory for requested buffer of size 1073741824",
        "out_of_memory",
    ),
)


def main() -> None:
    cases = [
        _case("a newer operator set", _model(opset=99), "unsupported_version"),
        _case("a newer operator set of Microsoft's domain", _model(opset=21, ms=99), "unsupported_version"),
        _case("a newer IR version", _model(opset=21, ir=99), "unsupported_version"),
        _case("an unknown operator", _model(opset=21, operator="NoSuchOperator"), "unsupported_operators"),
        _case(
            "an unknown operator of Microsoft's domain",
            _model(opset=21, operator="NoSuchAttention", domain="com.microsoft", ms=1),
            "unsupported_operators",
        ),
        _case(
            "an unknown domain",
            _model(opset=21, operator="Own", domain="org.example", other=1),
            "unsupported_operators",
        ),
        _case("a type that no kernel takes", _model(opset=21, kind=TensorProto.STRING), "damaged_model"),
        _case("a cut file", _model(opset=21)[:-20], "damaged_model"),
        _case("an empty file", b"", "damaged_model"),
        _case("another kind of file", b"PK\x03\x04 this is no model", "damaged_model"),
        _case("weights that are not there", _external("model.onnx_data", None), "damaged_model"),
        _case("weights that are cut", _external("model.onnx_data", b"1234"), "damaged_model"),
    ]
    cases += [{"name": n, "message": m, "kind": k, "recorded": False} for n, m, k in UNPROVOKED]
    document = {"format": 1, "onnxruntime": onnxruntime.__version__, "cases": cases}
    (HERE / "onnx_load_errors.json").write_text(
        json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n"
    )


def _model(
    opset: int,
    *,
    operator: str = "Identity",
    domain: str = "",
    ms: int | None = None,
    other: int | None = None,
    ir: int = 10,
    kind: int = TensorProto.FLOAT,
) -> bytes:
    graph = helper.make_graph(
        [helper.make_node("Relu" if kind == TensorProto.STRING else operator, ["x"], ["y"], domain=domain)],
        "g",
        [helper.make_tensor_value_info("x", kind, [1])],
        [helper.make_tensor_value_info("y", kind, [1])],
    )
    sets = [helper.make_opsetid("", opset)]
    sets += [helper.make_opsetid("com.microsoft", ms)] if ms is not None else []
    sets += [helper.make_opsetid("org.example", other)] if other is not None else []
    model = helper.make_model(graph, opset_imports=sets)
    model.ir_version = ir
    return bytes(model.SerializeToString())


def _external(location: str, content: bytes | None) -> dict[str, bytes]:
    weight = onnx.TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[64])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "256")):
        weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    files = {"model.onnx": bytes(model.SerializeToString())}
    return files | ({} if content is None else {location: content})


def _case(name: str, model: bytes | dict[str, bytes], kind: str) -> dict[str, Any]:
    files = model if isinstance(model, dict) else {"model.onnx": model}
    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            (Path(folder) / file).write_bytes(content)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        try:
            onnxruntime.InferenceSession(str(Path(folder) / "model.onnx"), options)
        except Exception as error:  # ONNX Runtime has a class for each status
            message = str(error).replace(folder, "/data/bundle")
            return {"name": name, "message": message, "kind": kind, "recorded": True}
    raise AssertionError(f"ONNX Runtime opens {name}")


if __name__ == "__main__":
    main()
