import json
import os
import shutil
from pathlib import Path

import pytest

from pit_deploy import export
from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, OutputExistsError
from pit_deploy.web_view import web_view


@pytest.fixture
def bundle(tiny_checkpoint, tmp_path) -> Path:
    source = tiny_checkpoint(max_position_embeddings=320)
    (source / "generation_config.json").write_text('{"eos_token_id": [256, 9], "top_k": 7}')
    (source / "LICENSE").write_text("MIT\n")
    export(source, tmp_path / "bundle", weights="fp32", tables="fp32")
    return tmp_path / "bundle"


def edit(bundle: Path, change) -> None:
    """Change the manifest as a stranger would; the files stay as they are."""
    file = bundle / "manifest.json"
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def test_the_layout_is_that_of_transformers_js(bundle, tmp_path):
    out = web_view(bundle, tmp_path / "view")
    found = sorted(p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file())
    assert found == [
        "LICENSE",
        "config.json",
        "generation_config.json",
        "onnx/model.onnx",
        "onnx/model.onnx_data",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((out / "config.json").read_text())
    assert config.pop("transformers.js_config") == {"dtype": "fp32", "use_external_data_format": True}
    assert config == json.loads((bundle / "config.json").read_text())
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["top_k"] == 7
    assert generation["eos_token_id"] == list(Bundle.open(bundle).manifest.end_ids) == [256, 9]


def test_weights_are_not_copied_where_links_are_possible(bundle, tmp_path, monkeypatch):
    linked = web_view(bundle, tmp_path / "linked") / "onnx" / "model.onnx_data"
    assert linked.stat().st_ino == (bundle / "model.onnx_data").stat().st_ino

    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    copied = web_view(bundle, tmp_path / "copied") / "onnx" / "model.onnx_data"
    assert copied.stat().st_ino != linked.stat().st_ino
    assert copied.read_bytes() == linked.read_bytes()


def test_the_exported_graph_has_the_symbol_that_transformers_js_needs(bundle):
    import onnx

    graph = onnx.load(bundle / "model.onnx", load_external_data=False).graph
    for value in graph.input:
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch_size", value.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m["inputs"][0]["shape"].__setitem__(0, "N"),
            r"first dimension of input_ids is N.*looks for the symbol batch_size",
        ),
        (
            lambda m: m["states"][0]["shape"].__setitem__(0, 1),
            r"first dimension of past_key_values.0.key is 1.*looks for the symbol batch_size",
        ),
        (lambda m: m["inputs"].append({**m["inputs"][0], "name": "other"}), r"the inputs are .*other.* feeds"),
        (lambda m: m["states"][0].update(name="cache.0"), r"the states differ .* in cache.0, past_key_values.0.key"),
    ],
)  # fmt: skip
def test_names_that_transformers_js_does_not_find_are_refused(bundle, tmp_path, change, message):
    edit(bundle, change)
    with pytest.raises(InputError, match=message):
        web_view(bundle, tmp_path / "view")
    assert not (tmp_path / "view").exists()


def test_an_output_that_is_taken_is_left_alone(bundle, tmp_path):
    taken = tmp_path / "view"
    taken.mkdir()
    (taken / "mine").write_text("mine")
    with pytest.raises(OutputExistsError):
        web_view(bundle, taken)
    assert (taken / "mine").read_text() == "mine"
    with pytest.raises(InputError, match="is or holds the input"):
        web_view(bundle, bundle, overwrite=True)
    web_view(bundle, taken, overwrite=True)
    assert not (taken / "mine").exists()


def test_a_damaged_bundle_is_refused(bundle, tmp_path):
    weights = bundle / "model.onnx_data"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(InputError, match=r"model.onnx_data has \d+ bytes"):
        web_view(bundle, tmp_path / "view")


def test_a_file_of_another_name_is_refused(bundle, tmp_path):
    shutil.move(bundle / "model.onnx", bundle / "graph.onnx")

    def rename(manifest):
        manifest["model_file"] = "graph.onnx"
        for entry in manifest["files"]:
            if entry["path"] == "model.onnx":
                entry["path"] = "graph.onnx"

    edit(bundle, rename)
    with pytest.raises(
        InputError, match=r"the model file is graph.onnx, and transformers.js looks for model.onnx"
    ):
        web_view(bundle, tmp_path / "view")
