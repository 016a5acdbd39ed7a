"""Bundles for the tests of the app's ONNX backend, and what Python makes of them.

    python tools/run_bundles.py OUT [BUNDLE...]

Exports tiny random models in every form that the backend knows, and models that ONNX Runtime refuses. Beside each
bundle lies NAME.expected.json: generations of pit-deploy's own loop and the figures of `pit-deploy verify`. Bundles
named on the command line are linked into OUT and get one too.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import onnx

from pit_deploy.bundle import Bundle, write_manifest
from pit_deploy.exporting import export
from pit_deploy.generate import generate
from pit_deploy.manifest import Manifest, ManifestBody
from pit_deploy.parity import verify
from pit_deploy.runtimes import open_runtime
from pit_deploy.sampling import SamplingOptions

VECTORS = Path(__file__).resolve().parents[2] / "runtime_tests" / "vectors"
FORMS: dict[str, dict[str, Any]] = {
    "fp32-shared": {"weights": "fp32", "tables": "fp32", "layout": "shared"},
    "int8-shared": {"weights": "int8", "tables": "int8", "layout": "shared"},
    "fp32-untied-all": {"weights": "fp32", "tables": "fp32", "layout": "untied", "logits": "all"},
    "fp32-standard": {"weights": "fp32", "tables": "fp32", "layout": "untied", "profile": "standard"},
}


def main() -> None:
    out = Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sys.path.insert(0, str(VECTORS))
    import make_recorded

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "tiny"
        checkpoint.mkdir()
        make_recorded.write_checkpoint(checkpoint)
        for name, form in FORMS.items():
            export(checkpoint, out / name, **form)
            write_expected(out / name, out, steps=20)
    broken(out / "fp32-shared", out / "broken")
    for given in map(Path, sys.argv[2:]):
        (out / given.name).symlink_to(given.resolve())
        write_expected(out / given.name, out, steps=32)


def write_expected(path: Path, out: Path, steps: int) -> None:
    bundle = Bundle.open(path)
    runtime = open_runtime(bundle, threads=1)
    generations = []
    for prompt in ("The token", "x = 3.14159 and 日本"):
        ids = bundle.tokenizer.encode(prompt, add_special_tokens=False).ids
        for temperature, top_p in ((0.0, 1.0), (0.9, 0.95)):
            runtime.reset()
            options = SamplingOptions(temperature=temperature, top_p=top_p, seed=7)
            made = generate(
                runtime, ids, max_new_tokens=steps, options=options, stop_ids=bundle.manifest.end_ids
            )
            generations.append(
                {
                    "prompt": prompt,
                    "prompt_ids": ids,
                    "temperature": temperature,
                    "top_p": top_p,
                    "new_tokens": steps,
                    "ids": list(made.ids),
                    "text": bundle.tokenizer.decode(list(made.ids), skip_special_tokens=True),
                }
            )
    figures = verify(bundle, threads=1).to_dict()
    for key in ("per_position", "layers"):
        figures.pop(key)
    document = {"generations": generations, "parity": figures}
    (out / f"{path.name}.expected.json").write_text(
        json.dumps(document, ensure_ascii=False), encoding="utf-8"
    )


def broken(good: Path, out: Path) -> None:
    """Copies of a bundle whose files are what the manifest says, with a model that cannot be opened."""
    out.mkdir()
    expected = {}

    def make(name: str, kind: str, change: Any = None, **fields: Any) -> None:
        expected[name] = kind
        folder = out / name
        shutil.copytree(good, folder)
        manifest = Bundle.open(folder).manifest.model_dump(mode="json")
        if change is not None:
            model = onnx.load(folder / "model.onnx", load_external_data=False)
            replaced = change(model)
            data = replaced if isinstance(replaced, bytes) else model.SerializeToString()
            (folder / "model.onnx").write_bytes(data)
        manifest.pop("files")
        write_manifest(folder, ManifestBody.model_validate(manifest | fields))

    def newer(model: Any) -> None:
        model.opset_import[0].version = 99

    def unknown(model: Any) -> None:
        node = next(n for n in model.graph.node if n.domain == "com.microsoft")
        node.op_type = "OperatorOfTomorrow"

    make("newer-operator-set", "unsupported_version", newer)
    make("unknown-operator", "unsupported_operators", unknown)
    make("cut-graph", "damaged_model", lambda model: model.SerializeToString()[:-100])
    make("other-heads", "bad_value", architecture=_heads(good))
    (out / "expected.json").write_text(json.dumps(expected))


def _heads(good: Path) -> dict[str, Any]:
    architecture: Manifest = Bundle.open(good).manifest
    return architecture.architecture.model_dump() | {"num_key_value_heads": 1}


if __name__ == "__main__":
    main()
