"""A manifest that says other things than the graph is refused when the runtime opens it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pit_deploy.bundle import Bundle
from pit_deploy.errors import PitDeployError
from pit_deploy.exporting import export
from pit_deploy.manifest import BundleError
from pit_deploy.runtimes import open_runtime
from pit_deploy.runtimes.onnxruntime import OnnxRuntime


@pytest.fixture(scope="module", params=["default", "standard"])
def bundle(
    request: pytest.FixtureRequest,
    make_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    out = tmp_path_factory.mktemp("bundles") / request.param
    export(make_checkpoint(), out, weights="fp32", tables="fp32", profile=request.param)
    return out


def change(bundle: Path, copy: Path, **fields: Any) -> Bundle:
    """The bundle with other values in its manifest; `__` in a name stands for a dot."""
    shutil.copytree(bundle, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    for name, value in fields.items():
        *path, last = [int(part) if part.isdigit() else part for part in name.split("__")]
        node = manifest
        for part in path:
            node = node[part]
        node[last] = value
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return Bundle.open(copy)


def test_what_export_wrote_agrees(bundle: Path) -> None:
    assert open_runtime(Bundle.open(bundle)).context_length == 320


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"context_length": 2**31 - 1}, "says context_length 2147483647, and the graph has 320"),
        ({"context_length": 4096}, "says context_length 4096, and the graph has 320"),
        ({"context_length": 319}, "says context_length 319, and the graph has 320"),
        ({"profile": "weird"}, "says profile 'weird', and known are default, standard"),
        ({"vocab_size": 259}, "says vocab_size 259, and the graph has 258"),
        ({"logits": "all"}, "says logits all, and the graph has last"),
        ({"architecture__num_attention_heads": 2}, "num_attention_heads 2, and the graph has 4"),
        ({"architecture__num_key_value_heads": 4}, "num_key_value_heads 4, and the graph has 2"),
        ({"architecture__head_dim": 32}, "head_dim 32, and the graph has 16"),
        (
            {"architecture__num_hidden_layers": 3, "hidden_states": []},
            "num_hidden_layers 3, and the graph has 2",
        ),
        ({"inputs__0__name": "tokens"}, r"inputs.0 \('tokens', .* and the graph has \('input_ids'"),
        ({"inputs__0__dtype": "int32"}, r"inputs.0 .*'int32'.* and the graph has .*'int64'"),
        ({"outputs__0__shape": ["batch_size", 1, 9]}, r"outputs.0 .*9\].* and the graph has .*258\]"),
        ({"states__3__shape": ["batch_size", 2, "past_sequence_length", 8]}, "states.3"),
        ({"states__1__output": "present.0.key"}, "states .*present"),
        ({"states": []}, "the number of states 0, and the graph has 4"),
        ({"hidden_states__2": "nowhere"}, "hidden_states 'nowhere', and the graph has no value of that name"),
    ],
)
def test_what_the_graph_does_not_say(
    bundle: Path, tmp_path: Path, fields: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BundleError, match=message) as caught:
        open_runtime(change(bundle, tmp_path / "copy", **fields))
    assert caught.value.kind == "bad_value" and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_the_other_profile(bundle: Path, tmp_path: Path) -> None:
    own = Bundle.open(bundle).manifest.profile
    other = {"default": "standard", "standard": "default"}[own]
    with pytest.raises(BundleError, match=f"says profile {other}, and the graph has {own}"):
        open_runtime(change(bundle, tmp_path / "copy", profile=other))


def test_a_failure_while_running_is_one_sentence(bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    opened = Bundle.open(bundle)
    manifest = opened.manifest
    runtime = OnnxRuntime(opened.model_path, 4096, manifest.hidden_states, 1, manifest.profile)
    ids = [1] * 400  # 320 positions are in the rotary table
    for run in (runtime.prefill, runtime.all_logits):
        with pytest.raises(
            PitDeployError, match=r"ONNX Runtime failed while running .*model.onnx: "
        ) as caught:
            run(ids)
        assert "\n" not in str(caught.value) and "onnxruntime_src" not in str(caught.value)
        assert runtime.position == 0
    assert np.isfinite(runtime.prefill([1, 2])).all()
    assert capfd.readouterr().err == ""


def test_a_cache_that_no_memory_holds(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    if opened.manifest.profile == "standard":
        pytest.skip("its cache grows as it is used")
    with pytest.raises(PitDeployError, match=r"a cache of .* does not fit into memory"):
        OnnxRuntime(opened.model_path, 2**45)
