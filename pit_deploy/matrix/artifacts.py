"""What the matrix checks: a bundle or a folder for each row and target, exported once and kept by its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pit_deploy.bundle import CARRIED, Bundle, sha256
from pit_deploy.errors import InputError, PitDeployError
from pit_deploy.files import atomic_output
from pit_deploy.json_files import read_json
from pit_deploy.matrix.table import LAYOUTS, PRECISIONS, Row

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"weights": "fp32", "tables": "fp32"},
    "fp16": {"weights": "fp16", "tables": "fp16"},
    "int8": {"weights": "int8", "tables": "int8"},
    "int4": {"weights": "int4", "tables": "int4"},
    "mixed": {"weights": "int4", "tables": "int8"},
}
"""Options of `export` by precision."""

TARGETS = ("onnx", "executorch", "coreml", "fold", "hf")
"""`fold` is the model before any exporter, and `hf` a folder that transformers opens."""

_PACKAGES = (
    "torch",
    "transformers",
    "onnx",
    "onnx-ir",
    "onnxruntime",
    "executorch",
    "torchao",
    "coremltools",
)
_NOT_EXPORTING = (
    "matrix",
    "benchmark",
    "training",
    "runtimes",
    "templates",
    "cli.py",
    "console.py",
    "report",
)
_ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Subject:
    """A checkpoint of the matrix.

    Without `bundles` each artifact is exported when it is due. With them they alone are checked: their manifests
    say which rows they stand in, and `source` (None: not at hand) is what they were made from.
    """

    name: str
    source: Path | None
    bundles: tuple[Path, ...] = ()
    layouts: tuple[str, ...] = LAYOUTS
    precisions: tuple[str, ...] = PRECISIONS

    def rows(self) -> list[Row]:
        """Its rows, in the order of the table."""
        if not self.bundles:
            return [_row(self.name, layout, p) for layout in self.layouts for p in self.precisions]
        order = [_row(self.name, layout, p) for layout in LAYOUTS for p in PRECISIONS]
        return sorted({self._row(bundle) for bundle in self.bundles}, key=order.index)

    def given(self, row: Row, target: str) -> Path | None:
        """The bundle of a row among `bundles`; None where there is none. Raises `InputError` for two."""
        fit = [b for b in self.bundles if setting_of(b)[0] == target and self._row(b) == row]
        if len(fit) > 1:
            raise InputError(f"{fit[0]} and {fit[1]} are the same setting of {self.name}; give one of them.")
        return fit[0] if fit else None

    def _row(self, bundle: Path) -> Row:
        _, layout, precision = setting_of(bundle)
        return _row(self.name, layout, precision)


def _row(checkpoint: str, layout: str, precision: str) -> Row:
    return Row.model_validate({"checkpoint": checkpoint, "layout": layout, "precision": precision})


class NoArtifact(PitDeployError):
    """A row has no artifact for a target; the message says why."""


def setting_of(bundle: Path) -> tuple[str, str, str]:
    """Runtime, layout and precision of a bundle, by its manifest alone: a damaged one keeps its place in the table.

    The precision is `mixed` where weights, tables or single tensors differ. Raises `InputError` where the manifest
    does not say.
    """
    manifest = read_json(bundle / "manifest.json")
    try:
        precision = manifest["precision"]
        stated = {precision["weights"], precision["tables"]}
        bits = {tensor["bits"] for tensor in manifest["quantization"]}
        mixed = len(stated) > 1 or len(bits) > 1
        setting = manifest["runtime"], manifest["layout"], "mixed" if mixed else precision["weights"]
        _row(bundle.name, *setting[1:])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{bundle / 'manifest.json'} does not say runtime, layout and precision; give a bundle that pit-deploy "
            f"export wrote."
        ) from error
    return setting


def prepare(subject: Subject, row: Row, target: str, store: Path) -> Path:
    """The artifact of `row` for `target`: given, kept in `store` from before, or made now.

    Raises `NoArtifact` where there is none, for example for a layout that the target does not write.
    """
    if subject.bundles and target in ("onnx", "executorch", "coreml"):
        found = subject.given(row, target)
        if found is None:
            raise NoArtifact(f"no {target} bundle of this row was given")
        return found
    if target in ("fold", "hf"):
        if subject.source is None:
            raise NoArtifact("the checkpoint that the bundles were made from was not given")
        if target == "fold" and row.precision != "fp32":
            raise NoArtifact("PyTorch runs the fold as it is before an exporter rounds it, in fp32")
        if target == "hf" and (row.layout != "untied" or row.precision not in ("fp32", "fp16")):
            raise NoArtifact("transformers opens the untied fold, in floats")
    assert subject.source is not None, "a subject has a source or bundles"
    if target == "fold":
        return subject.source
    options: dict[str, Any] = {**SETTINGS[row.precision], "layout": row.layout}
    if target == "coreml" and row.precision == "fp32":
        options["profile"] = "stateless"  # the others compute in float16
    out = store / "artifacts" / f"{row.checkpoint}-{row.layout}-{row.precision}-{target}"
    key = _key(subject.source, target, options)
    if (out / ".key").is_file() and (out / ".key").read_text() == key:
        return out / "bundle"
    _make(subject.source, target, options, out, key)
    return out / "bundle"


def _make(source: Path, target: str, options: dict[str, Any], out: Path, key: str) -> None:
    from pit_deploy.exporting import export

    with atomic_output(out, overwrite=True) as partial:
        try:
            export(source, partial / "bundle", to=target, **options)
        except InputError as error:
            raise NoArtifact(f"not exported: {error}") from error
        (partial / ".key").write_text(key)


def _key(source: Path, target: str, options: dict[str, Any]) -> str:
    """What an artifact depends on: the checkpoint's bytes, the options, the exporters' code and packages."""
    parts = [
        content_hash(source),
        target,
        json.dumps(options, sort_keys=True),
        _exporting_code(),
        package_versions(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def content_hash(folder: Path) -> str:
    """SHA-256 over names and bytes of all files below `folder`."""
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".key"):
        digest.update(f"{file.relative_to(folder).as_posix()} {sha256(file)}\n".encode())
    return digest.hexdigest()


def carried_hash(folder: Path) -> str:
    """SHA-256 over the files of a checkpoint that bundles carry."""
    there = [folder / name for name in CARRIED if (folder / name).is_file()]
    return hashlib.sha256("".join(f"{p.name} {sha256(p)}" for p in there).encode()).hexdigest()


def code_hash(*files: Path) -> str:
    """SHA-256 over the text of Python files, tests left out; folders count with all that is in them."""
    digest = hashlib.sha256()
    for file in sorted(_python_files(files)):
        digest.update(f"{file.name} {sha256(file)}\n".encode())
    return digest.hexdigest()


def _python_files(files: tuple[Path, ...]) -> Iterator[Path]:
    for file in files:
        found = file.rglob("*.py") if file.is_dir() else [file]
        yield from (p for p in found if not p.name.endswith("_test.py") and p.name != "conftest.py")


@cache
def _exporting_code() -> str:
    own = [p for p in _ROOT.iterdir() if p.suffix == ".py" or p.is_dir()]
    exporting = [p for p in own if not p.name.startswith(_NOT_EXPORTING)]
    try:
        import pit_export

        exporting += [Path(p) for p in pit_export.__path__]
    except ImportError:
        pass
    return code_hash(*exporting)


@cache
def package_versions() -> str:
    """Versions of the packages that export and run, in one line."""
    return " ".join(f"{name}={package_version(name)}" for name in (*_PACKAGES, "onnxruntime-genai"))


def package_version(name: str) -> str | None:
    """Of an installed package; None where it is not."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def carried_differences(bundle: Bundle, source: Path) -> list[str]:
    """Sentences on files that an export copies from the checkpoint and that are others here, byte for byte."""
    found = []
    for name in CARRIED:
        ours, theirs = bundle.path / name, source / name
        if ours.is_file() and theirs.is_file() and ours.read_bytes() != theirs.read_bytes():
            found.append(f"{name} is not the checkpoint's: {_what_differs(name, ours, theirs)}")
    return found


def _what_differs(name: str, ours: Path, theirs: Path) -> str:
    try:
        here, there = (json.loads(p.read_text(encoding="utf-8")) for p in (ours, theirs))
    except (ValueError, UnicodeDecodeError):
        return "its bytes differ"
    if name == "tokenizer.json":
        return _tokenizer_difference(here, there)
    names = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    if not names:
        return "its bytes differ"
    return ", ".join(
        f"{key} is {json.dumps(here.get(key))} and was {json.dumps(there.get(key))}" for key in names[:3]
    )


def _tokenizer_difference(here: dict[str, Any], there: dict[str, Any]) -> str:
    merges = [[_merge(m) for m in d.get("model", {}).get("merges", [])] for d in (here, there)]
    missing = [m for m in merges[1] if m not in set(merges[0])] if merges[0] != merges[1] else []
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"the merge {missing[0]!r}{more} is missing ({len(merges[0])} of {len(merges[1])} merges)"
    parts = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    return f"{', '.join(parts)} differ" if parts else "its bytes differ"


def _merge(merge: Any) -> str:
    """A merge is written as "a b" or as ["a", "b"]."""
    return merge if isinstance(merge, str) else " ".join(merge)
