from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from pit_deploy.errors import InputError
from pit_deploy.manifest import KINDS, BundleError, Manifest, QuantizationSummary, TensorError
from pit_deploy.manifest_reader import (
    SCHEMA_PATH,
    format_manifest,
    manifest_schema,
    parse_manifest,
    schema_text,
)

ROOT = Path(__file__).parents[1]
GOOD_TEXT = (ROOT / "runtime_tests/vectors/manifests/good_onnx.json").read_text(encoding="utf-8")
MISSING = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good manifest with one field, dotted, set to `value` or left out."""
    data: dict[str, Any] = json.loads(GOOD_TEXT)
    node: Any = data
    *head, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    for part in head:
        node = node[part]
    if value is MISSING:
        del node[last]
    else:
        node[last] = copy.deepcopy(value)
    return data


def refusal(data: Any) -> BundleError:
    text = data if isinstance(data, str | bytes) else json.dumps(data)
    with pytest.raises(BundleError) as caught:
        parse_manifest(text, "/b/manifest.json")
    message = str(caught.value)
    assert isinstance(caught.value, InputError) and caught.value.exit_code == 2
    assert message.startswith("/b/manifest.json") and "\n" not in message and len(message) < 500
    return caught.value


def test_round_trip_keeps_the_text() -> None:
    manifest = parse_manifest(GOOD_TEXT)
    assert format_manifest(manifest) == GOOD_TEXT
    assert manifest.end_ids == (2, 104)
    assert manifest.states[3].name == "past_key_values.1.value"
    assert manifest.inputs[0].shape == ("batch_size", "sequence_length")


def test_a_coreml_manifest_names_its_packages() -> None:
    path = ROOT / "runtime_tests/vectors/manifests/good_coreml.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    assert parse_manifest(json.dumps(data)).coreml is not None
    data["coreml"]["functions"][1]["package"] = "prefill.mlpackage"
    error = refusal(data)
    assert error.kind == "unlisted_file"
    assert "'coreml.functions.1.package'" in str(error) and "'prefill.mlpackage'" in str(error)
    data["coreml"] = None
    assert refusal(data).kind == "bad_value"


def test_frozen() -> None:
    manifest = parse_manifest(GOOD_TEXT)
    with pytest.raises(ValidationError):
        manifest.vocab_size = 3
    with pytest.raises(ValidationError):
        manifest.precision.weights = "fp32"


# Field, value, kind, and words of the sentence. Each is one change to the good manifest.
BAD: list[tuple[str, Any, str, list[str]]] = [
    ("precision.weights", "int3", "bad_value", ["'precision.weights'", "'int3'", "'int4'"]),
    ("precision.block_size", 0, "bad_value", ["'precision.block_size'", "0"]),
    ("precision.extra", True, "unknown_field", ["'precision.extra'", "true", "version 1"]),
    ("surprise", "x" * 1000, "unknown_field", ["'surprise'", "..."]),
    ("context_length", MISSING, "missing_field", ["'context_length' is missing"]),
    ("golden", MISSING, "missing_field", ["'golden'"]),
    ("coreml", {"specification_version": 9}, "missing_field", ["'coreml.minimum_system'"]),
    ("states.1.dtype", MISSING, "missing_field", ["'states.1.dtype'"]),
    ("context_length", "128", "bad_value", ["'context_length'", "'128'"]),
    ("context_length", True, "bad_value", ["'context_length'", "true"]),
    ("context_length", 2**31, "bad_value", ["'context_length'", "2147483648"]),
    ("files.0.size", 10**300, "bad_value", ["'files.0.size'", "..."]),
    ("files.0.size", 1e308, "bad_value", ["'files.0.size'"]),
    ("files.0.sha256", "0" * 63, "bad_value", ["'files.0.sha256'"]),
    ("files", [], "bad_value", ["'files'"]),
    ("inputs.0.shape.1", -1, "bad_value", ["'inputs.0.shape.1'", "-1"]),
    ("inputs.0.shape.1", None, "bad_value", ["'inputs.0.shape.1'", "null"]),
    ("outputs.0.dtype", "complex64", "bad_value", ["'outputs.0.dtype'", "'complex64'"]),
    ("created_by", {"onnx": 1}, "bad_value", ["'created_by.onnx'", "1"]),
    ("source.name", "/home/me/model", "bad_value", ["'source.name'", "'/home/me/model'"]),
    ("source.kind", "tied", "bad_value", ["'source.kind'", "'tied'"]),
    ("runtime", "tflite", "bad_value", ["'runtime'", "'tflite'", "'coreml'"]),
    ("layout", "tied", "bad_value", ["'layout'", "'tied'"]),
    ("architecture.head_dim", None, "bad_value", ["'architecture.head_dim'", "null"]),
    ("end_ids", [], "bad_value", ["'end_ids'", "[]"]),
    ("end_ids", [-1], "bad_value", ["'end_ids.0'", "-1"]),
    ("golden.positions", 0, "bad_value", ["'golden.positions'"]),
    ("quantization.0.relative_rms", -0.5, "bad_value", ["'quantization.0.relative_rms'", "-0.5"]),
    ("quantization.0.symmetric", 1, "bad_value", ["'quantization.0.symmetric'", "1"]),
    ("tokenizer_checks", [], "bad_value", ["'tokenizer_checks'"]),
    ("format_version", 2, "newer_version", ["version 2", "version 1", "update pit-deploy"]),
    ("format_version", 10**30, "newer_version", ["version 1", "update pit-deploy"]),
    ("format_version", 0, "older_version", ["version 0", "version 1", "export the bundle again"]),
    ("format_version", -1, "older_version", ["version -1"]),
    ("format_version", True, "bad_value", ["'format_version'", "true"]),
    ("format_version", MISSING, "missing_field", ["'format_version'"]),
    ("format", "zip", "not_a_bundle", ["'zip'"]),
    ("format", MISSING, "not_a_bundle", ["null"]),
]

# The same for rules between fields, and for 1.0 in place of 1, which JSON Schema takes for an integer.
BEYOND_SCHEMA: list[tuple[str, Any, str, list[str]]] = [
    ("context_length", 128.0, "bad_value", ["'context_length'", "128.0"]),
    ("end_ids", [2, 2], "bad_value", ["'end_ids'", "twice"]),
    ("end_ids", [2, 105], "bad_end_id", ["'end_ids'", "105"]),
    ("bos_id", 105, "bad_token_id", ["'bos_id'", "105"]),
    ("tokenizer_checks.0.ids", [5, 400], "bad_token_id", ["'tokenizer_checks.0.ids'", "400", "105"]),
    ("golden.prompts.0.ids", [105], "bad_token_id", ["'golden.prompts.0.ids'", "105"]),
    ("runtime", "coreml", "bad_value", ["'coreml'", "null", "'runtime'"]),
    ("golden.file", "other.json", "unlisted_file", ["'golden.file'", "'other.json'"]),
    ("tokenizer_length", 113, "bad_vocabulary", ["'tokenizer_length'", "113", "112"]),
    ("model_file", "model", "unlisted_file", ["'model_file'", "'model'"]),
    ("files.0.path", "manifest.json", "bad_value", ["'files'", "'manifest.json'"]),
    ("files.0.path", "model.onnx", "bad_value", ["'files'", "'model.onnx'", "twice"]),
    ("hidden_states", ["a"], "bad_value", ["'hidden_states'", '["a"]', "3 names"]),
    ("quantization_summary", None, "bad_value", ["'quantization_summary'", "null", "2 tensors"]),
    ("quantization_summary.worst", "x", "bad_value", ["'quantization_summary.worst'", "'x'"]),
    ("format_version", 1.0, "bad_value", ["'format_version'", "1.0"]),
]


@pytest.mark.parametrize(("field", "value", "kind", "words"), [*BAD, *BEYOND_SCHEMA])
def test_one_sentence_for_each_fault(field: str, value: Any, kind: str, words: list[str]) -> None:
    error = refusal(changed(field, value))
    assert error.kind == kind
    for word in words:
        assert word in str(error)


def test_more_faults_are_counted() -> None:
    data = changed("layout", "tied") | {"runtime": "x", "logits": 3}
    assert "'layout'" in str(refusal(data)) and "(and 2 more such problems)" in str(refusal(data))


def test_a_newer_version_is_refused_before_its_fields_are_looked_at() -> None:
    assert refusal({"format": "pit-deploy bundle", "format_version": 7, "new": {}}).kind == "newer_version"


BAD_PATHS = [
    "/etc/passwd", "../x", "a/../x", "a/..", "..", ".", "./a", "a/./b", "a//b", "a/", "//server/x",
    "C:/x", "C:x", "a\\b", "\\\\server\\x", "a\x00b", "a\nb", "a\x7f",
]  # fmt: skip
GOOD_PATHS = [
    "a",
    "a/b",
    "...",
    "a..b/..c",
    ".hidden",
    "model.mlpackage/Data/x y",
    "Größe/模型.onnx",
    "~",
    "a%2e%2e",
]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_paths_may_not_leave(path: str) -> None:
    for field in ("model_file", "files.1.path", "golden.file", "source.files.0.name"):
        error = refusal(changed(field, path))
        assert error.kind == "path_escape" and f"'{field}'" in str(error)
    assert not schema_accepts(changed("files.1.path", path))


@pytest.mark.parametrize("path", GOOD_PATHS)
def test_paths_inside(path: str) -> None:
    data = changed("files.0.path", path)
    assert parse_manifest(json.dumps(data)).files[0].path == path
    assert schema_accepts(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", ["line 1, column 1"]),
        (b'{\n "format": "pit-deploy bundle",\n "x" 1}', ["line 3, column 6"]),
        (b"\xff\xfe{}", ["UTF-8", "byte 0"]),
        (b"\xef\xbb\xbf{}", ["line 1, column 1", "BOM"]),
        (b"[" * 200_000, ["nested too deeply"]),
        (b'{"a": 1, "b": 2, "a": 3}', ["'a'", "twice"]),
        (b'{"a": "\\ud800"}', ["half a surrogate pair"]),
        (b'{"a": NaN}', ["NaN"]),
        (b'{"a": -Infinity}', ["-Infinity"]),
        (b'{"a": ' + b"9" * 5000 + b"}", ["4300"]),
    ],
)
def test_bad_json(text: bytes, words: list[str]) -> None:
    error = refusal(text)
    assert error.kind == "bad_json"
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("text", "word"),
    [("{}", "'format'"), ("[]", "an array"), ("null", "null"), ("3", "a number"), ('"x"', "a string")],
)
def test_other_json(text: str, word: str) -> None:
    error = refusal(text)
    assert error.kind == "not_a_bundle" and word in str(error)


def test_a_number_past_float_is_refused() -> None:
    text = GOOD_TEXT.replace('"max_abs": 0.031', '"max_abs": 1e999')
    error = refusal(text)
    assert error.kind == "bad_value" and "'quantization.0.max_abs'" in str(error)


def test_terminal_codes_of_a_stranger_are_escaped() -> None:
    for data in (changed("layout", "\x1b[2J"), changed("\x1b[2J", 1), changed("model_file", "../\x1b[2J")):
        assert "\x1b" not in str(refusal(data))


def test_the_summary_is_arithmetic() -> None:
    tensors = [
        TensorError(name=n, bits=4, block_size=32, symmetric=True, relative_rms=r, max_abs=1.0)
        for n, r in (("a", 0.25), ("b", 0.75), ("c", 0.5))
    ]
    summary = QuantizationSummary.of(tensors)
    assert summary is not None
    assert (summary.worst, summary.worst_relative_rms, summary.mean_relative_rms) == ("b", 0.75, 0.5)
    assert QuantizationSummary.of([]) is None


def schema_accepts(data: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(json.loads(SCHEMA_PATH.read_text("utf-8"))).is_valid(data))


def test_the_schema_on_disk_is_the_one_of_the_models() -> None:
    path = SCHEMA_PATH.relative_to(ROOT)
    assert SCHEMA_PATH.read_text(encoding="utf-8") == schema_text(), (
        f"{path} is out of date; rewrite it with: python -m pit_deploy.manifest_reader > {path}"
    )
    jsonschema.Draft202012Validator.check_schema(manifest_schema())


def test_the_schema_by_itself() -> None:
    for field, value, kind, _ in BAD:
        assert not schema_accepts(changed(field, value)), (field, value)
        assert kind in KINDS
    for field, value, kind, _ in BEYOND_SCHEMA:
        assert schema_accepts(changed(field, value)), (field, value)
        assert kind in KINDS


def test_the_schema_accepts_what_is_written() -> None:
    assert schema_accepts(json.loads(GOOD_TEXT))
    assert schema_accepts(json.loads(format_manifest(parse_manifest(GOOD_TEXT))))


def test_every_field_of_the_schema_is_required_and_on_the_page() -> None:
    schema = manifest_schema()
    page = (ROOT / "docs/bundle.md").read_text(encoding="utf-8")
    for part in [schema, *schema["$defs"].values()]:
        assert set(part["required"]) == set(part["properties"]) - {
            "nested_head"
        }  # absent where there is none
        assert part["additionalProperties"] is False
        for name, field in part["properties"].items():
            assert f"`{name}`" in page, name
            assert field.get("description") or "$ref" in field
    for kind in KINDS:
        assert f"`{kind}`" in page
    assert set(schema["properties"]) == set(Manifest.model_fields)
