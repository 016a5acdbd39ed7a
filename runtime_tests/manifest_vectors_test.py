"""Our reader against the vectors that the Kotlin, Swift and JavaScript readers run too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pit_deploy.bundle import Bundle
from pit_deploy.manifest import KINDS, BundleError
from pit_deploy.manifest_reader import SCHEMA_PATH

VECTORS = Path(__file__).parent / "vectors" / "manifests"
CASES: list[dict[str, Any]] = json.loads((VECTORS / "index.json").read_text(encoding="utf-8"))["cases"]
SCHEMA = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))


def build(case: dict[str, Any], folder: Path) -> Path:
    """The bundle of a case, in a folder of its own below `folder`."""
    bundle = folder / "bundle"
    bundle.mkdir()
    shutil.copyfile(VECTORS / case["manifest"], bundle / "manifest.json")
    for file in case["files"]:
        path = bundle / file["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        if "link" in file:
            path.symlink_to(file["link"])
        else:
            path.write_bytes(file["text"].encode())
    return bundle


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_reader(case: dict[str, Any], tmp_path: Path) -> None:
    bundle = build(case, tmp_path)
    if case["expect"] == "ok":
        opened = Bundle.open(bundle, check_hashes=case["check_hashes"])
        assert opened.model_path.exists()
        return
    with pytest.raises(BundleError) as caught:
        Bundle.open(bundle, check_hashes=case["check_hashes"])
    assert caught.value.kind == case["expect"], str(caught.value)
    assert str(bundle) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_schema_alone(case: dict[str, Any]) -> None:
    try:
        data = json.loads((VECTORS / case["manifest"]).read_text(encoding="utf-8"))
        accepted = jsonschema.Draft202012Validator(SCHEMA).is_valid(data)
    except json.JSONDecodeError:
        accepted = False
    assert accepted == case["schema_accepts"]


def test_the_index_covers_files_and_kinds() -> None:
    names = [case["name"] for case in CASES]
    assert len(set(names)) == len(names)
    assert {case["manifest"] for case in CASES} == {p.name for p in VECTORS.glob("*.json")} - {"index.json"}
    # These two cannot be provoked with a few text files: a file that may not be read, and another tokenizer.
    expected = {case["expect"] for case in CASES} - {"ok"}
    assert expected == KINDS - {"unreadable_file", "tokenizer_mismatch"}
