"""What `manifest.json` of a bundle says: its fields and its rules; `manifest_reader` has its text.

The page docs/bundle.md explains each field. Kotlin, Swift and JavaScript read the same file: the rules that a
JSON Schema cannot say (ids below the tokenizer's length, files that are listed) are in `Manifest._consistent`
and, as vectors, in runtime_tests/vectors/manifests/.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, Literal, NoReturn, get_args

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from pit_deploy.errors import InputError
from pit_deploy.schema_part import SchemaPart

FORMAT: Final = "pit-deploy bundle"
FORMAT_VERSION: Final = 1

Kind = Literal[
    "not_a_bundle",
    "bad_json",
    "newer_version",
    "older_version",
    "missing_field",
    "unknown_field",
    "bad_value",
    "path_escape",
    "unlisted_file",
    "bad_end_id",
    "bad_token_id",
    "bad_vocabulary",
    "missing_file",
    "wrong_size",
    "wrong_hash",
    "unreadable_file",
    "tokenizer_mismatch",
]
KINDS: frozenset[str] = frozenset(get_args(Kind))


class BundleError(InputError):
    """A bundle cannot be used; `kind` is the same word in every language that reads bundles."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind


def fail(error: Kind, message: str, field: str = "", **values: Any) -> NoReturn:
    """Raise what pydantic collects: `message` has `{names}` of `values`, `field` is relative to the model."""
    raise PydanticCustomError(error, message, {**values, "field": field})


# The rule for paths in two forms: a regular expression for the schema (ECMA 262), and the reasons for people.
_PATH_PATTERN = r"^(?!(?:.*/)?\.{1,2}(?:/|$))[^/\\:\u0000-\u001f\u007f]+(?:/[^/\\:\u0000-\u001f\u007f]+)*$"
_FORBIDDEN = re.compile(r"[\\:\x00-\x1f\x7f]")


def _check_path(path: str) -> str:
    if path.startswith("/"):
        fail("path_escape", "it is an absolute path, and paths are relative to the bundle")
    if _FORBIDDEN.search(path):
        fail("path_escape", "it holds a backslash, a colon or a control character, and paths have none")
    parts = path.split("/")
    if ".." in parts:
        fail("path_escape", "it has the part '..', and paths may not leave the bundle")
    if "" in parts or "." in parts:
        fail("path_escape", "it has an empty part or the part '.', and each part of a path is a name")
    return path


_BIGGEST_SIZE = 2**53 - 1  # the largest integer that JavaScript holds exactly
_BIGGEST_COUNT = 2**31 - 1  # ids and dimensions are 32-bit integers in the apps

# Strict, so that "1", 1.0 and true are not taken for 1: readers in other languages would disagree on them.
Size = Annotated[int, Field(strict=True, ge=0, le=_BIGGEST_SIZE)]
Count = Annotated[int, Field(strict=True, ge=1, le=_BIGGEST_COUNT)]
TokenId = Annotated[int, Field(strict=True, ge=0, le=_BIGGEST_COUNT)]
Dimension = Annotated[int, Field(strict=True, ge=0, le=_BIGGEST_COUNT)]
Figure = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1, max_length=1024)]
PlainName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^/\\]+$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[
    str,
    Field(min_length=1, max_length=1024, json_schema_extra={"pattern": _PATH_PATTERN}),
    AfterValidator(_check_path),
]
DType = Literal[
    "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "int4", "uint4", "bool"
]


class FileEntry(SchemaPart):
    """A file of the bundle."""

    path: RelativePath
    """Path inside the bundle, with `/`."""
    size: Size
    """Bytes."""
    sha256: Sha256
    """SHA-256, 64 lower-case hexadecimal digits."""


class SourceFile(SchemaPart):
    """A file of the checkpoint that the bundle was made from."""

    name: RelativePath
    """Path inside the checkpoint, with `/`."""
    size: Size
    """Bytes."""
    sha256: Sha256
    """SHA-256, 64 lower-case hexadecimal digits."""


class Source(SchemaPart):
    """The checkpoint that the bundle was made from."""

    name: PlainName
    """Name of the checkpoint, without a path."""
    model_type: Name
    """`model_type` of its config.json."""
    kind: Literal["pit", "folded", "plain"]
    """PIT checkpoint, folded checkpoint, or a plain Hugging Face directory."""
    files: tuple[SourceFile, ...]
    """Files that were read."""
    license: Name | None
    """Licence identifier, where the source states one."""


class Precision(SchemaPart):
    """Number formats of the parts; single tensors may be finer, as `quantization` says."""

    weights: Literal["fp32", "fp16", "int8", "int4"]
    """The backbone's matrices; the coarsest format where it is mixed."""
    tables: Literal["fp32", "fp16", "int8", "int4"]
    """Embedding and head; the coarsest format where it is mixed."""
    activations: Literal["fp32", "fp16", "int8"]
    """Inputs of the matrix products."""
    block_size: Count | None
    """Weights that share a scale; null where nothing is quantised or a scale covers a whole channel."""
    symmetric: Flag | None
    """Whether there are no zero points; null where nothing is quantised."""
    accuracy_level: Annotated[int, Field(strict=True, ge=0, le=4)] | None
    """`accuracy_level` of ONNX Runtime's MatMulNBits; null elsewhere."""
    kv_cache: Literal["fp32", "fp16", "int8"]
    """Keys and values in the cache."""


class Architecture(SchemaPart):
    """Sizes of the backbone, in the words of config.json."""

    model_type: Name
    """Architecture of the backbone."""
    hidden_size: Count
    """Width of the residual stream."""
    num_hidden_layers: Count
    """Layers."""
    num_attention_heads: Count
    """Query heads."""
    num_key_value_heads: Count
    """Key and value heads."""
    head_dim: Count
    """Width of a head."""
    intermediate_size: Count
    """Width of the MLP."""


class Value(SchemaPart):
    """An input or output of the graph that is not a state."""

    name: Name
    """Name in the graph."""
    dtype: DType
    """Element type."""
    shape: tuple[Dimension | Name, ...]
    """Dimensions; a string is the name of a free one."""


class State(SchemaPart):
    """What is kept from one call to the next."""

    name: Name
    """Name of the input, or of the state where the runtime keeps it itself."""
    output: Name | None
    """Name of the output with its next value; null where the runtime keeps it itself."""
    dtype: DType
    """Element type."""
    shape: tuple[Dimension | Name, ...]
    """Dimensions; a string is the name of a free one."""


class TensorError(SchemaPart):
    """What quantisation did to one tensor."""

    name: Name
    """Name of the tensor in the folded checkpoint."""
    bits: Annotated[int, Field(strict=True, ge=1, le=16)]
    """Bits of a code."""
    block_size: Count | None
    """Weights that share a scale; null for a whole channel."""
    symmetric: Flag
    """Whether there are no zero points."""
    relative_rms: Figure
    """Root mean square of the error over that of the tensor."""
    max_abs: Figure
    """Largest absolute error."""


class QuantizationSummary(SchemaPart):
    """Worst and mean of `quantization`."""

    worst: Name
    """Name of the tensor with the largest relative error."""
    worst_relative_rms: Figure
    """Its relative error."""
    mean_relative_rms: Figure
    """Mean of the relative errors over the tensors, each counted once."""

    @classmethod
    def of(cls, tensors: Sequence[TensorError]) -> QuantizationSummary | None:
        """The summary of `tensors`; None where there are none."""
        if not tensors:
            return None
        worst = max(tensors, key=lambda t: t.relative_rms)
        mean = sum(t.relative_rms for t in tensors) / len(tensors)
        return cls(worst=worst.name, worst_relative_rms=worst.relative_rms, mean_relative_rms=mean)


class TokenizedText(SchemaPart):
    """A text and its token ids."""

    text: str
    """The text, exactly: nothing is trimmed or normalised."""
    ids: tuple[TokenId, ...]
    """Its ids."""


class Golden(SchemaPart):
    """The record of the training-time model that the bundle carries."""

    file: RelativePath
    """Its main file."""
    positions: Count
    """Positions recorded, over all prompts."""
    prompts: Annotated[tuple[TokenizedText, ...], Field(min_length=1)]
    """The prompts; their ids are what the model is fed, special tokens included."""


class CoreMLFunction(SchemaPart):
    """A function of a Core ML program."""

    name: Literal["prefill", "decode"]
    """What it is for: several tokens of a prompt, or a single one."""
    package: RelativePath
    """The .mlpackage folder that holds it."""
    function: Name
    """Its name there."""
    tokens: Count
    """New tokens that it takes, always so many."""
    inputs: Annotated[tuple[Value, ...], Field(min_length=1)]
    """Its inputs, caches that are passed in among them; states are not."""
    outputs: Annotated[tuple[Value, ...], Field(min_length=1)]
    """Its outputs."""


class CoreMLPart(SchemaPart):
    """A part of a Core ML program."""

    name: Name
    """`embedding`, `layers.N`, `head` or `other`."""
    bytes: Size
    """Bytes of its constants."""
    unit: Literal["cpu", "gpu", "neural_engine"]
    """The compute unit that it suits, by known limits; Core ML chooses on the device."""
    reason: Name
    """Why."""


class CoreMLProgram(SchemaPart):
    """What an app needs to know of a Core ML program besides the fields that all runtimes have."""

    specification_version: Count
    """Version of the model format."""
    minimum_system: Literal["iOS17", "iOS18"]
    """Oldest system that loads it; macOS and the others by the same year."""
    compute_units: Literal["all", "cpuAndGPU", "cpuAndNeuralEngine"]
    """What to set in MLModelConfiguration."""
    functions: Annotated[tuple[CoreMLFunction, ...], Field(min_length=1)]
    """Functions; those of one package share its weights and its states."""
    parts: tuple[CoreMLPart, ...]
    """Sizes and advice by part, in the model's order; a table that serves both ends is counted once."""


class NestedHeadPart(SchemaPart):
    """How the head shortlists the vocabulary."""

    columns: Count
    """Leading columns of the table that estimate every logit."""
    shortlist: Count
    """Ids whose logits are finished with the other columns; the others keep the estimate."""
    miss_rate: Figure | None
    """Share of held-out calibration positions whose best token is not in the shortlist; null where it was not
    measured."""
    kl: Figure | None
    """Mean KL of the next token there, the full head against this one, in nats."""
    positions: Count | None
    """Positions that both were measured on."""


class ManifestBody(SchemaPart):
    """All of a manifest apart from the files of the bundle, which `write_manifest` adds."""

    format: Literal["pit-deploy bundle"] = FORMAT
    """Always `pit-deploy bundle`."""
    format_version: Literal[1] = FORMAT_VERSION
    """Version of this file's format, 1."""
    created_by: dict[Name, Name]
    """Versions of the tools, by name."""
    source: Source
    """The checkpoint that the bundle was made from."""
    folds: tuple[Name, ...]
    """What was folded into the tables, for example `final_norm_gain`, `bridge`, `transform`."""
    layout: Literal["untied", "shared"]
    """Two tables, or one table for embedding and head."""
    runtime: Literal["onnx", "executorch", "coreml"]
    """The runtime that opens `model_file`."""
    profile: Name
    """Setting of the exporter that shaped the graph."""
    model_file: RelativePath
    """The file (or .mlpackage folder) that the runtime opens."""
    precision: Precision
    """Number formats of the parts."""
    architecture: Architecture
    """Sizes of the backbone."""
    inputs: Annotated[tuple[Value, ...], Field(min_length=1)]
    """Inputs of the graph, without the states."""
    outputs: Annotated[tuple[Value, ...], Field(min_length=1)]
    """Outputs of the graph, without the states and without `hidden_states`."""
    states: tuple[State, ...]
    """Keys, values and whatever else lasts from call to call, in the graph's order."""
    hidden_states: tuple[Name, ...]
    """Names in the graph: the embedding's output, then one a layer; empty where the graph has no names for
    them."""
    logits: Literal["last", "all"]
    """Logits of the last position only, or of all positions."""
    vocab_size: Count
    """Rows of the table, and width of the logits."""
    tokenizer_length: Count
    """1 + the tokenizer's largest id; ids from there on are masked inside the graph."""
    context_length: Count
    """Tokens that the cache holds."""
    bos_id: TokenId | None
    """Id that starts a text; null where the model has none."""
    end_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    """Ids that end generation, any of them, in order; the first is the main one."""
    chat_template: Flag
    """Whether the bundle carries a chat template."""
    quantization: tuple[TensorError, ...]
    """Error of each quantised tensor."""
    quantization_summary: QuantizationSummary | None
    """Worst and mean of `quantization`; null where it is empty."""
    tokenizer_checks: Annotated[tuple[TokenizedText, ...], Field(min_length=1)]
    """Texts with their ids, encoded without added special tokens, to check a tokenizer on the device."""
    coreml: CoreMLProgram | None = None
    """Functions, sizes and compute units of a Core ML program; null for other runtimes."""
    golden: Golden | None
    """The record of the training-time model; null where the bundle carries none."""
    nested_head: NestedHeadPart | None = Field(default=None, exclude_if=lambda value: value is None)
    """How the head shortlists the vocabulary; left out where it computes all logits in full."""

    @model_validator(mode="after")
    def _consistent(self) -> ManifestBody:
        if self.tokenizer_length > self.vocab_size:
            fail(
                "bad_vocabulary",
                "the tokenizer has ids that the table of {rows} rows (vocab_size) lacks",
                "tokenizer_length",
                value=self.tokenizer_length,
                rows=self.vocab_size,
            )
        self._check_ids("bad_end_id", "end_ids", self.end_ids)
        _check_unique("end_ids", self.end_ids)
        if self.bos_id is not None:
            self._check_ids("bad_token_id", "bos_id", (self.bos_id,))
        for i, check in enumerate(self.tokenizer_checks):
            self._check_ids("bad_token_id", f"tokenizer_checks.{i}.ids", check.ids)
        for i, prompt in enumerate(self.golden.prompts if self.golden else ()):
            self._check_ids("bad_token_id", f"golden.prompts.{i}.ids", prompt.ids)
        expected = self.architecture.num_hidden_layers + 1
        if len(self.hidden_states) not in (0, expected):
            fail(
                "bad_value",
                "it should be empty or have {expected} names, one for the embedding and one a layer",
                "hidden_states",
                value=list(self.hidden_states),
                expected=expected,
            )
        self._check_summary()
        if (self.coreml is None) != (self.runtime != "coreml"):
            message = "it should be null exactly where 'runtime' is not 'coreml', and that is '{runtime}'"
            fail("bad_value", message, "coreml", value=self.coreml and "an object", runtime=self.runtime)
        return self

    def _check_ids(self, kind: Kind, field: str, ids: Iterable[int]) -> None:
        for id in ids:
            if id >= self.tokenizer_length:
                message = "it should be below the tokenizer's length, {length}"
                fail(kind, message, field, value=id, length=self.tokenizer_length)

    def _check_summary(self) -> None:
        summary, names = self.quantization_summary, [t.name for t in self.quantization]
        if (summary is None) != (not names):
            message = "it should be null exactly where 'quantization' is empty, and that has {count} tensors"
            value = summary and summary.model_dump()
            fail("bad_value", message, "quantization_summary", value=value, count=len(names))
        if summary is not None and summary.worst not in names:
            message = "it is not among the tensors of 'quantization'"
            fail("bad_value", message, "quantization_summary.worst", value=summary.worst)
        _check_unique("quantization", names)


class Manifest(ManifestBody):
    """A whole manifest."""

    files: Annotated[tuple[FileEntry, ...], Field(min_length=1)]
    """Every file of the bundle apart from manifest.json, sorted by path."""

    @model_validator(mode="after")
    def _files_listed(self) -> Manifest:
        paths = [entry.path for entry in self.files]
        _check_unique("files", paths)
        if "manifest.json" in paths:
            fail("bad_value", "a manifest cannot list itself", "files", value="manifest.json")
        folder = self.model_file + "/"
        if not any(path == self.model_file or path.startswith(folder) for path in paths):
            fail("unlisted_file", "it is not listed in 'files'", "model_file", value=self.model_file)
        for i, function in enumerate(self.coreml.functions if self.coreml else ()):
            if not any(path.startswith(function.package + "/") for path in paths):
                message = "it is no folder of files in 'files'"
                fail("unlisted_file", message, f"coreml.functions.{i}.package", value=function.package)
        if self.golden and self.golden.file not in paths:
            fail("unlisted_file", "it is not listed in 'files'", "golden.file", value=self.golden.file)
        return self


def _check_unique(field: str, values: Iterable[str | int]) -> None:
    seen: set[str | int] = set()
    for value in values:
        if value in seen:
            fail("bad_value", "it is there twice", field, value=value)
        seen.add(value)
