"""Bundles in WebAssembly: Node, headless Chromium, and transformers.js as a client that knows no manifest."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pit_deploy import export, run, verify
from pit_deploy.bundle import Bundle, sha256
from pit_deploy.errors import ContextFullError, InputError, PitDeployError, RuntimeDiedError
from pit_deploy.runtimes import browser, browser_tools, open_runtime, open_text_runtime
from pit_deploy.runtimes.onnxruntime import OnnxRuntime
from pit_deploy.text_parity import verify_text
from pit_deploy.web_view import web_view

PROMPT = "Why?"


def missing(*, page: bool) -> str | None:
    """Why the browser runtimes cannot run here; None where they can."""
    try:
        browser_tools.node()
        browser_tools.installed_modules()
        if page:
            browser_tools.chromium()
    except InputError as error:
        return str(error)
    return None


in_node = pytest.mark.skipif(missing(page=False) is not None, reason=str(missing(page=False)))
in_page = pytest.mark.skipif(missing(page=True) is not None, reason=str(missing(page=True)))


@pytest.fixture(scope="module")
def bundles(make_checkpoint, tmp_path_factory) -> dict[str, Path]:
    """Of a model with two tables, whose greedy text is not one token again and again."""
    source, folder = make_checkpoint(tie_word_embeddings=False), tmp_path_factory.mktemp("browser")
    settings = {
        "fp32": {"weights": "fp32", "tables": "fp32"},
        "int8": {"weights": "int8", "tables": "int8"},
        "int4": {"weights": "int4", "tables": "int8"},
        "standard": {"weights": "int8", "tables": "int8", "profile": "standard"},
    }
    for name, options in settings.items():
        export(source, folder / name, context=288, layout="untied", **options)
    export(make_checkpoint(), folder / "shared", context=288)
    return {name: folder / name for name in (*settings, "shared")}


def with_float_activations(bundle: Bundle, folder: Path) -> OnnxRuntime:
    """The native runtime on a bundle without rounding activations to int8, which WebAssembly does not do."""
    import onnx

    shutil.copytree(bundle.path, folder)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    onnx.save(model, folder / "model.onnx")
    return OnnxRuntime.open(folder, bundle.manifest, threads=1)


@in_node
@pytest.mark.parametrize("name", ["fp32", "int8", "int4", "standard", "shared"])
def test_wasm_in_node_gives_the_logits_of_the_native_runtime(bundles, tmp_path, name):
    bundle = Bundle.open(bundles[name])
    wasm, native = (
        open_runtime(bundle, "onnxruntime-web"),
        with_float_activations(bundle, tmp_path / "native"),
    )
    ids = list(range(40, 60))
    states, logits = native.hidden_states(ids)
    room = 1e-5 * float(np.abs(logits).max())
    np.testing.assert_allclose(wasm.prefill(ids), logits[-1], atol=room)
    np.testing.assert_allclose(wasm.all_logits(ids), logits, atol=room)
    stepped = [wasm.decode(i) for i in ids]  # all_logits left the cache empty
    np.testing.assert_allclose(stepped, logits, atol=room)
    np.testing.assert_allclose(wasm.hidden_states(ids)[0], states, atol=1e-5 * float(np.abs(states).max()))


@in_node
def test_verify_in_node_passes_with_every_layer(bundles):
    report = verify(bundles["fp32"], runtime="onnxruntime-web", layers=True)
    assert report.failures == [] and report.runtime == "onnxruntime-web"
    assert report.greedy_equal == report.greedy_tokens
    assert len(report.layers) == 3 and max(error.largest for error in report.layers) < 1e-3


@in_node
def test_verify_in_node_names_the_layer_of_a_broken_bundle(bundles, tmp_path):
    """One block of codes of the second layer is zeroed, and the hashes are made to match."""
    import onnx

    from pit_deploy.runtimes.onnxruntime import external_tensors

    broken = tmp_path / "broken"
    shutil.copytree(bundles["fp32"], broken)
    tensors = external_tensors(onnx.load(broken / "model.onnx", load_external_data=False))
    tensor = next(t for t in tensors if "layers.1" in t.name and "down" in t.name)
    data = bytearray((broken / tensor.location).read_bytes())
    data[tensor.offset : tensor.offset + tensor.length // 4] = bytes(tensor.length // 4)
    (broken / tensor.location).write_bytes(data)
    manifest = json.loads((broken / "manifest.json").read_text())
    for entry in manifest["files"]:
        entry["sha256"] = sha256(broken / entry["path"])
    (broken / "manifest.json").write_text(json.dumps(manifest))
    report = verify(broken, runtime="onnxruntime-web")
    assert not report.passed
    assert report.first_diverging_layer == 2
    assert "that of layer 1" in report.failures[-1]


@in_node
def test_more_than_the_context_is_refused_before_running(bundles):
    runtime = open_runtime(Bundle.open(bundles["int8"]), "onnxruntime-web")
    runtime.prefill([1] * 280)
    with pytest.raises(ContextFullError):
        runtime.prefill([1] * 9)
    assert runtime.position == 280
    runtime.prefill([1] * 8)
    runtime.reset()
    assert runtime.position == 0


@in_node
def test_a_process_that_dies_is_reported_and_started_again(bundles):
    runtime = open_runtime(Bundle.open(bundles["fp32"]), "onnxruntime-web")
    before = runtime.prefill([1, 2, 3])
    os.kill(runtime._worker._process.pid, signal.SIGKILL)
    with pytest.raises(
        RuntimeDiedError, match=r"onnxruntime-web in Node was ended by the signal SIGKILL while running"
    ):
        runtime.prefill([4])
    with pytest.raises(PitDeployError, match="has ended; reset starts another"):
        runtime.prefill([4])
    runtime.reset()
    np.testing.assert_array_equal(runtime.prefill([1, 2, 3]), before)


@in_node
def test_the_rest_of_a_report_is_written_where_the_process_dies(bundles, monkeypatch):
    monkeypatch.setattr(browser, "node", lambda: "/bin/false")
    report = verify(bundles["fp32"], runtime="onnxruntime-web")
    assert not report.passed and report.total_bytes > 0
    assert "ended with status 1 while opening the model" in report.failures[0]
    assert np.isnan(report.kl).all() and report.to_dict()["mean_kl"] is None


@in_node
def test_a_graph_that_wasm_cannot_open_is_an_error_in_its_words(bundles, tmp_path):
    import onnx

    other = tmp_path / "other"
    shutil.copytree(bundles["fp32"], other)
    model = onnx.load(other / "model.onnx", load_external_data=False)
    node = next(n for n in model.graph.node if n.op_type == "Sigmoid")
    node.op_type, node.domain = "NoSuchOperator", "com.microsoft"
    onnx.save(model, other / "model.onnx")
    manifest = json.loads((other / "manifest.json").read_text())
    for entry in manifest["files"]:
        entry.update(sha256=sha256(other / entry["path"]), size=(other / entry["path"]).stat().st_size)
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        PitDeployError, match=r"onnxruntime-web in Node failed while opening .*NoSuchOperator"
    ):
        open_runtime(Bundle.open(other), "onnxruntime-web")


@in_page
def test_verify_in_chromium_passes_with_every_layer(bundles):
    report = verify(bundles["int8"], runtime="chromium", layers=True)
    assert report.failures == [] and report.runtime == "chromium"
    assert len(report.layers) == 3 and max(error.median for error in report.layers) < report.gate.layer


@in_page
def test_a_page_is_isolated_and_runs_on_two_threads(bundles):
    bundle = Bundle.open(bundles["fp32"])
    page, node = open_runtime(bundle, "chromium", threads=2), open_runtime(bundle, "onnxruntime-web")
    assert page.facts["threads"] == 2 and int(page.facts["browser"].split(".")[0]) >= 100
    np.testing.assert_allclose(page.prefill(range(40, 60)), node.prefill(range(40, 60)), atol=2e-5)
    page.close()


@in_page
@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_transformers_js_gives_the_text_of_pit_deploy(bundles, name):
    bundle = Bundle.open(bundles[name])
    runner = open_text_runtime(bundle, "transformers.js")
    text = runner.generate(PROMPT, 24)
    mine = run(bundles[name], PROMPT, max_new_tokens=24, runtime="onnxruntime-web", temperature=0)
    ids = list(mine.generation.ids)
    assert runner.ids[: len(ids)] == ids and len(set(ids)) > 3
    assert text == mine.text
    with pytest.raises(ContextFullError):
        runner.generate("x" * 300, 1)
    runner.close()


@in_page
def test_the_examples_of_the_documentation_run(bundles, tmp_path):
    """docs/browser.md, word for word, in a page: our own files, and transformers.js on a web view."""
    expected = run(bundles["int8"], PROMPT, max_new_tokens=24, temperature=0, runtime="onnxruntime-web")
    view = web_view(bundles["int8"], tmp_path / "view")
    script = Path(__file__).parent / "browser" / "example.mjs"
    modules, program = str(browser_tools.installed_modules()), browser_tools.chromium()
    prompt_ids = json.dumps(expected.prompt_ids)
    line = ["node", str(script), modules, program, str(bundles["int8"]), str(view), PROMPT, prompt_ids]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["own"]["ids"] == list(expected.generation.ids)
    assert found["own"]["finishReason"] == expected.generation.finish_reason
    assert found["theirs"]["text"] == expected.text


@in_page
def test_transformers_js_passes_verify(bundles):
    report = verify_text(bundles["fp32"], "transformers.js")
    assert report.passed and report.required and report.tokens > 0


@in_page
def test_transformers_js_stops_at_every_end_id(bundles, make_checkpoint, tmp_path):
    """The checkpoint's generation config gets a second end id, the first new one among those of its greedy text."""
    first = run(bundles["fp32"], PROMPT, max_new_tokens=24, temperature=0).generation.ids
    stop = next(id for n, id in enumerate(first) if n >= 3 and id not in first[:n])
    source = tmp_path / "source"
    shutil.copytree(make_checkpoint(tie_word_embeddings=False), source)
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, stop]}))
    export(source, tmp_path / "bundle", weights="fp32", tables="fp32", layout="untied", context=288)
    runner = open_text_runtime(Bundle.open(tmp_path / "bundle"), "transformers.js")
    runner.generate(PROMPT, 24)
    assert runner.ids == list(first[: first.index(stop) + 1])
    runner.close()


@in_page
def test_a_tokenizer_that_makes_other_ids_in_javascript_is_refused(bundles, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(bundles["fp32"], other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["tokenizer_checks"][0]["ids"].append(1)
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(PitDeployError, match="its tokenizer makes"):
        open_text_runtime(Bundle.open(other), "transformers.js")


def test_what_is_not_installed_is_named_with_the_command(bundles, tmp_path, monkeypatch):
    bundle = Bundle.open(bundles["fp32"])
    monkeypatch.setenv("PIT_DEPLOY_BROWSER", str(tmp_path))
    if missing(page=False) is not None and "Node" not in str(missing(page=False)):
        with pytest.raises(InputError, match=r"@huggingface/transformers .* is not in .*make setup-browser"):
            open_runtime(bundle, "onnxruntime-web")
    package = tmp_path / "node_modules" / "@huggingface" / "transformers"
    package.mkdir(parents=True)
    (package / "package.json").write_text('{"version": "1.0.0"}')
    with pytest.raises(InputError, match=r"has @huggingface/transformers 1.0.0, and 4\."):
        browser_tools.installed_modules()
    monkeypatch.setenv("PIT_DEPLOY_CHROMIUM", str(tmp_path / "none"))
    with pytest.raises(InputError, match="PIT_DEPLOY_CHROMIUM names"):
        browser_tools.chromium()
    monkeypatch.delenv("PIT_DEPLOY_CHROMIUM")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"need Node 20 or later.*make setup-browser"):
        open_runtime(bundle, "onnxruntime-web")
    with pytest.raises(InputError, match="There is no Chromium"):
        browser_tools.chromium()


def test_an_old_node_is_refused(tmp_path, monkeypatch):
    program = tmp_path / "node"
    program.write_text("#!/bin/sh\necho v18.19.0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(InputError, match=r"is version v18\.19\.0; the browser runtimes need 20"):
        browser_tools.node()


def test_options_that_wasm_cannot_take_are_refused(bundles, monkeypatch):
    bundle = Bundle.open(bundles["fp32"])
    with pytest.raises(InputError, match="one thread in Node; use --runtime chromium"):
        open_runtime(bundle, "onnxruntime-web", threads=2)
    monkeypatch.setattr(browser, "LARGEST_BUNDLE", 1000)
    with pytest.raises(
        InputError, match=r"WebAssembly takes 1000 at most; export with --weights int8 or int4"
    ):
        open_runtime(bundle, "onnxruntime-web")


@in_node
def test_the_javascript_tests_pass():
    """Sampling, the loop, files and tokenizers against the vectors that all languages share."""
    folder = Path(__file__).parent / "browser"
    tests = sorted(str(file) for file in folder.glob("*.test.mjs"))
    assert len(tests) == 5
    environment = {**os.environ, "PIT_DEPLOY_BROWSER": str(browser_tools.installed_modules())}
    done = subprocess.run(
        ["node", "--test", "--test-reporter=tap", *tests],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "# fail 0" in done.stdout and "# skipped 0" in done.stdout
