"""A folder in the layout that transformers.js looks for, made from an ONNX bundle without copying the weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pit_deploy.bundle import CARRIED, Bundle
from pit_deploy.errors import InputError
from pit_deploy.files import atomic_output, check_output
from pit_deploy.json_files import write_json

FOLDER, GRAPH, WEIGHTS = "onnx", "model.onnx", "model.onnx_data"
"""Where transformers.js looks for a model of `dtype` fp32. Other dtypes have other names, and the graph says how its
weights' file is called, so this is the one dtype whose files are those of a bundle as they are."""
_BATCH = "batch_size"
_INPUTS = ("input_ids", "attention_mask")


def web_view(bundle: Bundle | Path | str, out: Path | str, *, overwrite: bool = False) -> Path:
    """Write the web view of an ONNX bundle to `out` and return its path.

    Files are hard links to those of the bundle where the file system allows it, else copies. config.json gains what
    transformers.js has to know (`transformers.js_config`), generation_config.json has the manifest's end ids. Raises
    `InputError` for a bundle of another runtime, or with names that transformers.js does not find.
    """
    out = Path(out)
    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    check_output(out, overwrite=overwrite, source=bundle.path)
    if bundle.path.resolve() in out.resolve().parents:
        raise InputError(
            f"{out} is inside the bundle {bundle.path}, which is left as it is; name another folder."
        )
    check_names(bundle)
    listed = [entry.path for entry in bundle.manifest.files]
    weights = [path for path in listed if path == WEIGHTS]
    texts = [
        path
        for path in listed
        if path in CARRIED or path.upper().startswith(("LICENSE", "LICENCE", "NOTICE"))
    ]
    with atomic_output(out, overwrite=overwrite) as partial:
        (partial / FOLDER).mkdir()
        for path in (GRAPH, *weights):
            _link(bundle.file(path), partial / FOLDER / path)
        for path in texts:
            if path != "generation_config.json":
                _link(bundle.file(path), partial / path)
        own = {"dtype": "fp32", "use_external_data_format": bool(weights)}
        config = {**bundle.config, "transformers.js_config": own}
        write_json(partial / "config.json", config)
        write_json(partial / "generation_config.json", _generation_config(bundle))
    return out


def check_names(bundle: Bundle) -> None:
    """Raise `InputError` where transformers.js would not find its way in the graph or the folder."""
    manifest, where = bundle.manifest, bundle.path
    if manifest.runtime != "onnx":
        raise InputError(
            f"{where} is a bundle for {manifest.runtime}, and a web view needs one for onnx; export --to onnx."
        )
    if manifest.model_file != GRAPH:
        raise InputError(
            f"{where}: the model file is {manifest.model_file}, and transformers.js looks for {GRAPH}."
        )
    found = tuple(value.name for value in manifest.inputs)
    if sorted(found) != sorted(_INPUTS):
        raise InputError(
            f"{where}: the inputs are {_show(found)}, and transformers.js feeds {_show(_INPUTS)}."
        )
    shapes = {value.name: value.shape for value in manifest.inputs} | {
        s.name: s.shape for s in manifest.states
    }
    for name, shape in shapes.items():
        if not shape or shape[0] != _BATCH:
            raise InputError(
                f"{where}: the first dimension of {name} is {shape[0] if shape else 'missing'}, and transformers.js "
                f"looks for the symbol {_BATCH}; export the bundle again."
            )
    wanted = {
        f"past_key_values.{n}.{part}"
        for n in range(manifest.architecture.num_hidden_layers)
        for part in ("key", "value")
    }
    others = wanted ^ {state.name for state in manifest.states}
    if others:
        raise InputError(
            f"{where}: the states differ from what transformers.js looks for in {_show(sorted(others))}."
        )


def _generation_config(bundle: Bundle) -> dict[str, Any]:
    """As the bundle has it, with all end ids: transformers.js stops at those of this file alone."""
    ids = list(bundle.manifest.end_ids)
    return {**bundle.generation_config, "eos_token_id": ids[0] if len(ids) == 1 else ids}


def _link(source: Path, target: Path) -> None:
    """A second name for a file, or a copy where its file system has none."""
    target.parent.mkdir(exist_ok=True)
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def _show(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
