"""Ways to damage a copy of a bundle, for tests of what the matrix says of it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from pit_deploy.matrix.artifacts import Subject


def broken(subject: Subject, tmp_path: Path, damage: Callable[[Path], None], which: str = "fp32") -> Subject:
    """The subject with a damaged copy of one bundle."""
    bundles = []
    for bundle in subject.bundles:
        if bundle.name == which:
            shutil.copytree(bundle, tmp_path / which)
            damage(tmp_path / which)
            bundle = tmp_path / which
        bundles.append(bundle)
    return Subject(subject.name, subject.source, tuple(bundles))


def match_hashes(bundle: Path) -> None:
    """Sizes and hashes of the manifest as the files now are."""
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    for entry in manifest["files"]:
        content = (bundle / entry["path"]).read_bytes()
        entry["size"], entry["sha256"] = len(content), hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(manifest))


def zero_layer_7(bundle: Path) -> None:
    """Zero the down projection of layer 7 in the external data of a graph, as weights of 0."""
    import onnx

    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    names = [t for t in model.graph.initializer if "layers.7." in t.name and "down_proj" in t.name]
    assert names, [t.name for t in model.graph.initializer]
    data = bytearray((bundle / "model.onnx_data").read_bytes())
    for tensor in names:
        place = {e.key: e.value for e in tensor.external_data}
        if place and "scale" not in tensor.name:
            start, length = int(place["offset"]), int(place["length"])
            # Codes of 8 bits stand for zero at 128.
            value = 0 if tensor.data_type == onnx.TensorProto.FLOAT else 128
            data[start : start + length] = bytes([value]) * length
    (bundle / "model.onnx_data").write_bytes(bytes(data))
    match_hashes(bundle)
