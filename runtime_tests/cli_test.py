"""The command line as a user meets it: the whole chain on a tiny model, and bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pit_deploy import cli
from pit_deploy.bundle import Bundle

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run the command line in this process: exit status, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pit-deploy", *map(str, arguments)])
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGPIPE)}
        with pytest.raises(SystemExit) as ended:
            cli.main()
        for number, handler in before.items():
            signal.signal(number, handler)
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    """PIT checkpoint, fp32 and int8 bundles of the tiny model."""
    from pit_deploy import convert, export, fold

    room = tmp_path_factory.mktemp("made")
    convert(checkpoint, room / "pit")
    convert(checkpoint, room / "strict", bridge=False, check=False)
    fold(room / "pit", room / "untied")
    export(room / "pit", room / "fp32", weights="fp32")
    export(room / "pit", room / "int8")
    return room


def test_chain(call: Call, checkpoint: Path, tmp_path: Path):
    pit, bundle = tmp_path / "pit", tmp_path / "bundle"
    status, out, _ = call("convert", checkpoint, pit, "--json")
    assert status == 0
    report = json.loads(out)
    assert report["max_logit_difference"] <= 1e-3
    assert report["interface_error"] <= 1e-5
    status, out, _ = call("export", pit, bundle, "--weights", "fp32", "--json", tmp_path / "export.json")
    assert status == 0
    assert json.loads((tmp_path / "export.json").read_text())["tables"] == "fp32"
    status, out, _ = call("verify", bundle, "--json", "-", "--html", tmp_path / "report.html")
    assert status == 0
    report = json.loads(out)
    assert report["passed"]
    assert report["top1"] == 1.0
    assert report["positions"] >= 256
    assert report["load_rss_bytes"] is not None
    assert report["greedy_equal"] == report["greedy_tokens"]
    assert "<svg" in (tmp_path / "report.html").read_text()
    status, out, _ = call("verify", bundle, "--source", pit, "--tokens", "300", "--json")
    assert status == 0
    assert json.loads(out)["reference"].startswith("source")
    status, out, _ = call("run", bundle, "--prompt", "hello", "--max-new-tokens", "5", "--json")
    assert status == 0
    assert json.loads(out)["finish_reason"] in ("length", "stop")


def test_the_same_seed_gives_the_same_text(call: Call, made: Path):
    options = ("--prompt", "abc", "--max-new-tokens", "12", "--temperature", "1.5", "--json")
    texts = [call("run", made / "int8", *options, "--seed", seed)[1] for seed in (3, 3, 4)]
    ids = [json.loads(text)["ids"] for text in texts]
    assert ids[0] == ids[1] != ids[2]


def test_speculation_gives_the_same_text(call: Call, made: Path):
    options = ("--prompt", "abcdabcdabcdabcd", "--max-new-tokens", "60", "--seed", "2")
    for bundle in ("int8", "fp32"):
        plain, fast = (
            json.loads(call("run", made / bundle, *options, *more, "--json")[1])
            for more in ((), ("--speculate",))
        )
        assert plain["ids"] == fast["ids"] and plain["text"] == fast["text"]
        assert plain["speculation"] is None
        assert list(fast["speculation"]) == ["passes", "drafted", "accepted", "accepted_per_pass"]
        assert fast["speculation"]["accepted"] <= fast["speculation"]["drafted"]
    status, _, err = call("run", made / "int8", *options, "--speculate")
    assert status == 0 and "drafted tokens were right" in " ".join(err.split())


def test_chat_uses_the_template(call: Call, made: Path):
    status, out, _ = call("run", made / "fp32", "--prompt", "hi", "--chat", "--max-new-tokens", "2", "--json")
    assert status == 0
    text = Bundle.open(made / "fp32").tokenizer.decode(
        json.loads(out)["prompt_ids"], skip_special_tokens=False
    )
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize("what", ["pit", "fp32", "int8"])
def test_inspect(call: Call, made: Path, what: str):
    status, out, _ = call("inspect", made / what, "--json")
    assert status == 0
    found = json.loads(out)
    assert found["kind"] == ("pit" if what == "pit" else "bundle")
    assert call("inspect", made / what)[0] == 0


def test_every_field_of_generation_config_survives(made: Path, checkpoint: Path):
    original = (checkpoint / "generation_config.json").read_bytes()
    assert (made / "pit" / "generation_config.json").read_bytes() == original
    assert (made / "int8" / "generation_config.json").read_bytes() == original


def test_end_ids_are_the_ordered_union(made: Path):
    manifest = Bundle.open(made / "int8").manifest
    assert manifest.end_ids == (manifest.tokenizer_length - 2, 7)
    assert manifest.source.license == "mit"


def test_folded_checkpoints_export_with_a_golden_source(call: Call, made: Path, tmp_path: Path):
    for layout in ("untied", "shared"):
        assert call("fold", made / "pit", tmp_path / layout, "--layout", layout)[0] == 0
        status, _, err = call("export", tmp_path / layout, tmp_path / f"{layout}-bundle", "--weights", "fp32")
        assert status == 2
        assert "--golden" in err
        options = ("--weights", "fp32", "--golden", made / "pit")
        assert call("export", tmp_path / layout, tmp_path / f"{layout}-bundle", *options)[0] == 0
        status, _, _ = call("verify", tmp_path / f"{layout}-bundle")
        assert status == 0
        assert Bundle.open(tmp_path / f"{layout}-bundle").manifest.layout == layout
    status, _, err = call("fold", tmp_path / "untied", tmp_path / "again")
    assert status == 2
    assert "folded already" in err


def test_plain_checkpoints_export_as_they_are(call: Call, checkpoint: Path, make_checkpoint, tmp_path: Path):
    untied = make_checkpoint("qwen2", tie_word_embeddings=False)
    for source, layout in ((checkpoint, "shared"), (untied, "untied")):
        bundle = tmp_path / layout
        assert call("export", source, bundle, "--weights", "fp32")[0] == 0
        assert call("verify", bundle)[0] == 0
        assert Bundle.open(bundle).manifest.layout == layout
        assert Bundle.open(bundle).manifest.folds == ()
    status, _, err = call("export", untied, tmp_path / "no", "--layout", "shared")
    assert status == 2
    assert "tie_word_embeddings" in err
    assert not (tmp_path / "no").exists()


def test_hf_target_opens_in_transformers(call: Call, made: Path, checkpoint: Path, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    assert call("export", made / "pit", tmp_path / "hf", "--to", "hf")[0] == 0
    assert (tmp_path / "hf" / "README.md").read_bytes() == (checkpoint / "README.md").read_bytes()
    assert (tmp_path / "hf" / "LICENSE").is_file()
    ids = torch.arange(40)[None]
    with torch.no_grad():
        a, b = (AutoModelForCausalLM.from_pretrained(p)(ids).logits for p in (tmp_path / "hf", checkpoint))
    assert float((a - b).abs().max()) <= 1e-4
    status, _, err = call("export", made / "pit", tmp_path / "hf8", "--to", "hf", "--max-kl", "0.1")
    assert status == 2
    assert "writes floats" in err
    status, _, err = call("export", made / "pit", tmp_path / "hf8", "--to", "hf", "--weights", "int8")
    assert status == 2
    assert "fp32 or fp16" in err


def test_recipes(call: Call, made: Path, tmp_path: Path):
    from pit_deploy.recipes import recipe_names

    assert recipe_names() == ["android", "desktop", "ios", "web"]
    for name in recipe_names():
        assert call("export", made / "pit", tmp_path / name, "--recipe", name, "--context", "320")[0] == 0
    (tmp_path / "bad.toml").write_text('[export]\nwieghts = "int8"\n')
    status, _, err = call("export", made / "pit", tmp_path / "x", "--recipe", tmp_path / "bad.toml")
    assert status == 2
    assert "'wieghts' is not an export option" in err
    (tmp_path / "bad.toml").write_text('[export]\ncontext = "long"\n')
    status, _, err = call("export", made / "pit", tmp_path / "x", "--recipe", tmp_path / "bad.toml")
    assert "context is 'long'" in err
    (tmp_path / "bad.toml").write_text('[export]\nembedding = "int8"\nhead = "fp32"\n')
    status, _, err = call("export", made / "pit", tmp_path / "x", "--recipe", tmp_path / "bad.toml")
    assert status == 2
    assert "one setting, tables, governs the embedding and the head" in err


def one_sentence(text: str) -> bool:
    return text.startswith("Error: ") and text.count("\n") == 1 and "Traceback" not in text


BAD = {
    "no such source": (("convert", "nowhere", "OUT"), "does not exist"),
    "not a checkpoint": (("convert", "EMPTY", "OUT"), "config.json is missing"),
    "a file": (("convert", "FILE", "OUT"), "is a file"),
    "unknown option value": (("export", "PIT", "OUT", "--weights", "int3"), "int3"),
    "unknown target": (
        ("export", "PIT", "OUT", "--to", "tflite"),
        "this installation writes coreml, executorch, hf, onnx",
    ),
    "unknown profile": (("export", "PIT", "OUT", "--profile", "fast"), "default, standard"),
    "context too long": (("export", "PIT", "OUT", "--context", "100000"), "max_position_embeddings 320"),
    "context of nothing": (("export", "PIT", "OUT", "--context", "0"), "--context 0"),
    "output exists": (("export", "PIT", "PIT"), "exists already"),
    "not a bundle": (("verify", "PIT"), "is a checkpoint"),
    "other runtime": (("verify", "INT8", "--runtime", "coreml"), "onnxruntime"),
    "empty prompt": (("run", "INT8", "--prompt", ""), "prompt is empty"),
    "prompt too long": (("run", "INT8", "--prompt", "x" * 400), "holds 320"),
    "negative temperature": (("run", "INT8", "--prompt", "x", "--temperature", "-1"), "temperature"),
    "negative tokens": (("run", "INT8", "--prompt", "x", "--max-new-tokens", "-1"), "-1"),
    "no threads": (("run", "INT8", "--prompt", "x", "--threads", "0"), "--threads 0"),
    "a hundred thousand threads": (
        ("run", "INT8", "--prompt", "x", "--threads", "100000"),
        "--threads 100000",
    ),
    "a report on the bundle": (("verify", "INT8", "--html", "INT8"), "is a folder"),
    "a report in the bundle": (("verify", "INT8", "--html", "INT8FILE"), "inside the bundle"),
    "a report that is a folder": (("export", "PIT", "OUT", "--json", "EMPTY.json"), "is a folder"),
    "a report nowhere": (("verify", "INT8", "--json", "nowhere/x.json"), "is not a folder"),
    "golden that would be replaced": (
        ("export", "UNTIED", "PIT", "--golden", "PIT", "--overwrite"),
        "holds the input",
    ),
    "golden of another model": (("export", "UNTIED", "OUT", "--golden", "STRICT"), "was folded from"),
    "empty output": (("export", "PIT", ""), "is empty; name"),
    "tokens without source": (("verify", "INT8", "--tokens", "300"), "belongs to --source"),
    "too many tokens": (("verify", "INT8", "--source", "PIT", "--tokens", "10000000"), "evaluation text has"),
    "source nowhere": (("verify", "INT8", "--source", "nowhere"), "does not exist"),
    "half a character": (("run", "INT8", "--prompt", "a\udcff"), "not valid text"),
    "impossible generation config": (("export", "HOT", "OUT"), "temperature"),
    "wrong source of a bundle": (("verify", "INT8", "--source", "OTHER"), "is not the checkpoint"),
    "convert twice": (("convert", "PIT", "OUT"), "pit checkpoint already"),
    "half of a key pair": (("convert", "SRC", "OUT", "--memory-key", "z"), "belong together"),
    "no such calibration": (("export", "PIT", "OUT", "--calibration", "missing.txt"), "missing.txt"),
    "usage": (("export",), "Missing argument"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(
    call: Call, made: Path, checkpoint: Path, make_checkpoint, tmp_path: Path, case: str
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty.json").mkdir()
    hot = tmp_path.parent / "hot"
    if not hot.exists():
        shutil.copytree(made / "pit", hot)
        (hot / "generation_config.json").write_text(
            '{"eos_token_id": 7, "do_sample": true, "temperature": "hot"}'
        )
    places = {
        "OUT": tmp_path / "out",
        "PIT": made / "pit",
        "INT8": made / "int8",
        "SRC": checkpoint,
        "EMPTY": tmp_path / "empty",
        "FILE": tmp_path / "file",
        "OTHER": checkpoint,
        "EMPTY.json": tmp_path / "empty.json",
        "INT8FILE": made / "int8" / "r.html",
        "UNTIED": made / "untied",
        "STRICT": made / "strict",
        "HOT": hot,
    }
    arguments, message = BAD[case]
    status, _, err = call(*(places.get(a, a) for a in arguments))
    assert status == 2
    assert one_sentence(err), err
    assert message in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "empty.json", "file"], (
        "nothing half-written"
    )


def test_no_new_tokens_is_fine(call: Call, made: Path):
    status, out, _ = call("run", made / "int8", "--prompt", "x", "--max-new-tokens", "0", "--json")
    assert status == 0
    assert json.loads(out)["ids"] == []


def test_padded_rows_are_never_generated(call: Call, make_checkpoint, tmp_path: Path):
    import torch
    from safetensors.torch import load_file, save_file

    padded = make_checkpoint("llama", vocab_size=300)
    weights = load_file(padded / "model.safetensors")
    weights["model.embed_tokens.weight"][258:] = 50 * torch.randn(42, 64)  # they would win each time
    save_file(weights, padded / "model.safetensors", metadata={"format": "pt"})
    for tables in ("fp32", "int8"):
        bundle = tmp_path / tables
        assert call("export", padded, bundle, "--weights", "fp32", "--tables", tables)[0] == 0
        manifest = Bundle.open(bundle).manifest
        assert (manifest.vocab_size, manifest.tokenizer_length) == (300, 258)
        options = ("--prompt", "abc", "--max-new-tokens", "30", "--temperature", "3", "--json")
        ids = json.loads(call("run", bundle, *options)[1])["ids"]
        assert max(ids) < 258
    assert call("verify", tmp_path / "fp32")[0] == 0


def damage(bundle: Path, kind: str) -> None:
    file = bundle / "model.onnx_data"
    if kind == "cut by one byte":
        os.truncate(file, file.stat().st_size - 1)
    elif kind == "one bit":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif kind == "missing":
        file.unlink()
    else:
        manifest = json.loads((bundle / "manifest.json").read_text())
        if kind == "newer":
            manifest["format_version"] = 99
        elif kind == "escape":
            manifest["files"][0]["path"] = "../" + manifest["files"][0]["path"]
        (bundle / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut by one byte", "model.onnx_data"),
        ("one bit", "SHA-256"),
        ("missing", "model.onnx_data"),
        ("newer", "99"),
        ("escape", ".."),
    ],
)
def test_damaged_bundles_are_refused(call: Call, made: Path, tmp_path: Path, kind: str, message: str):
    shutil.copytree(made / "int8", tmp_path / "bundle")
    damage(tmp_path / "bundle", kind)
    status, _, err = call("verify", tmp_path / "bundle")
    assert status == 2
    assert one_sentence(err), err
    assert message in err


def test_a_graph_that_reads_an_unlisted_file_is_refused(call: Call, made: Path, tmp_path: Path):
    import onnx

    from pit_deploy.bundle import sha256

    bundle = tmp_path / "bundle"
    shutil.copytree(made / "int8", bundle)
    shutil.copy(bundle / "model.onnx_data", bundle / "other.bin")
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "other.bin"
    onnx.save(model, bundle / "model.onnx")
    manifest = json.loads((bundle / "manifest.json").read_text())
    for entry in manifest["files"]:
        file = bundle / entry["path"]
        entry.update(size=file.stat().st_size, sha256=sha256(file))
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    status, _, err = call("verify", bundle)
    assert status == 2
    assert "the manifest lacks" in err


def test_an_altered_layer_is_named(call: Call, made: Path, tmp_path: Path):
    """Row 22 of what users reported: one layer's weights off by 1e-2, hashes made to match."""
    import onnx

    from pit_deploy.bundle import sha256

    bundle = tmp_path / "bundle"
    shutil.copytree(made / "fp32", bundle)
    model = onnx.load(bundle / "model.onnx", load_external_data=False)
    tensor = next(t for t in model.graph.initializer if "layers.1.mlp.up_proj" in t.name)
    place = {entry.key: entry.value for entry in tensor.external_data}
    data = np.memmap(
        bundle / place["location"], np.float32, "r+", int(place["offset"]), (int(place["length"]) // 4,)
    )
    data += 1e-2
    data.flush()
    manifest = json.loads((bundle / "manifest.json").read_text())
    for entry in manifest["files"]:
        entry["sha256"] = sha256(bundle / entry["path"])
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    status, out, err = call("verify", bundle, "--json")
    assert status == 1
    assert json.loads(out)["first_diverging_layer"] == 2, "the hidden state after layer 1"
    assert "that of layer 1" in err


def test_a_template_that_reaches_for_the_interpreter_is_refused(call: Call, made: Path, tmp_path: Path):
    from pit_deploy.bundle import sha256

    bundle = tmp_path / "bundle"
    shutil.copytree(made / "int8", bundle)
    template = bundle / "chat_template.jinja"
    template.write_text("{{ cycler.__init__.__globals__.os.system('touch owned') }}")
    manifest = json.loads((bundle / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["path"] == template.name:
            entry.update(size=template.stat().st_size, sha256=sha256(template))
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    status, _, err = call("run", bundle, "--chat", "--prompt", "hi")
    assert status == 2
    assert one_sentence(err), err
    assert not Path("owned").exists()


def test_interrupted_export_leaves_what_was_there(made: Path, tmp_path: Path):
    """SIGTERM and SIGKILL in the middle of an export that replaces an older bundle."""
    shutil.copytree(made / "int8", tmp_path / "bundle")
    before = (tmp_path / "bundle" / "manifest.json").read_bytes()
    script = (
        "import sys, time, pit_export.onnx as m\n"
        "from pit_deploy import cli\n"
        "original = m.OnnxExporter.write\n"
        "def write(self, *a):\n"
        "    r = original(self, *a)\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
        "    return r\n"
        "m.OnnxExporter.write = write\n"
        "cli.main()\n"
    )
    line = [
        sys.executable,
        "-c",
        script,
        "export",
        str(made / "pit"),
        str(tmp_path / "bundle"),
        "--overwrite",
    ]
    for sent in (signal.SIGTERM, signal.SIGKILL):
        child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        child.send_signal(sent)
        _, err = child.communicate(timeout=30)
        assert child.returncode == (130 if sent == signal.SIGTERM else -signal.SIGKILL)
        assert "Traceback" not in err
        assert (tmp_path / "bundle" / "manifest.json").read_bytes() == before
        assert Bundle.open(tmp_path / "bundle", check_hashes=True)
        if sent == signal.SIGTERM:
            assert [p.name for p in tmp_path.iterdir()] == ["bundle"]
    from pit_deploy import export

    export(made / "pit", tmp_path / "bundle", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["bundle"], "the next run removes what SIGKILL left"


def test_help_is_quick_and_needs_no_framework():
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'onnx', 'onnxruntime', 'matplotlib'): sys.modules[name] = None\n"
        "sys.argv = ['pit-deploy', '--help']\n"
        "from pit_deploy import cli\n"
        "cli.main()\n"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        times.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
        assert "convert" in done.stdout
    assert min(times) < 1


def test_a_missing_framework_names_the_extra():
    script = (
        "import sys\n"
        "for name in ('torch', 'transformers'): sys.modules[name] = None\n"
        "sys.argv = ['pit-deploy', 'export', 'a', 'b']\n"
        "from pit_deploy import cli\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'pit-deploy[onnx]'" in done.stderr


def test_options_that_may_stand_anywhere(call: Call, made: Path):
    for arguments in (
        ("--debug", "inspect", made / "int8", "--json"),
        ("inspect", made / "int8", "--json", "--debug"),
    ):
        status, out, _ = call(*arguments)
        assert status == 0
        assert json.loads(out)["kind"] == "bundle"
    status, out, _ = call("run", made / "int8", "--prompt", "--json", "--max-new-tokens", "1", "--json")
    assert status == 0
    assert len(json.loads(out)["prompt_ids"]) == len("--json")


def test_a_closed_pipe_is_no_failed_check(made: Path):
    command = f"{sys.executable} -m pit_deploy.cli inspect {made / 'int8'} --json"
    line = f"{command} | head -c 1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


def test_demo_on_a_tiny_model(call: Call, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from pit_deploy import sample

    monkeypatch.setattr(sample, "write_sample", lambda out, **_: shutil.copytree(checkpoint, out))
    status, out, err = call("demo", tmp_path / "demo", "--json")
    assert status == 0, err
    result = json.loads(out)
    assert result["passed"]
    assert [e["weights"] for e in result["exports"]] == ["fp32", "int8"]
    page = (tmp_path / "demo" / "report.html").read_text()
    assert "<svg" in page
    assert call("demo", tmp_path / "demo")[0] == 2, "an output that exists"
    assert call("demo", tmp_path / "demo", "--overwrite")[0] == 0


def test_the_tables_rows_are_the_truth(call: Call, checkpoint: Path, tmp_path: Path):
    """Row 8 of what users reported: a vocab_size that is not the table's; nothing of its size is built."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 10**9}))
    status, out, err = call("convert", source, tmp_path / "pit", "--json")
    assert status == 0, err
    assert "vocab_size 1000000000, table rows 258, tokenizer length 258" in json.loads(out)["notes"][0]
    assert call("export", source, tmp_path / "bundle", "--weights", "fp32")[0] == 0
    assert call("verify", tmp_path / "bundle")[0] == 0
    assert Bundle.open(tmp_path / "bundle").manifest.vocab_size == 258
    assert json.loads((tmp_path / "bundle" / "config.json").read_text())["vocab_size"] == 258


def test_quantisers(call: Call, made: Path, tmp_path: Path):
    """Both keep what the record says of hidden states comparable, though the stream is rotated in the artifact."""
    errors = {}
    for quantizer in ("rtn", "feedback"):
        bundle = tmp_path / quantizer
        options = ("--weights", "int4", "--tables", "int8", "--quantizer", quantizer)
        assert call("export", made / "pit", bundle, *options)[0] == 0
        manifest = Bundle.open(bundle).manifest
        assert "block_rotation" in manifest.folds
        assert {entry.bits for entry in manifest.quantization} == {4, 8}
        _, out, _ = call("verify", bundle, "--layers", "--json")
        report = json.loads(out)
        assert report["layers"][0]["median"] < 0.02, "the embedding's rows are int8"
        errors[quantizer] = report["mean_kl"]
    assert errors["feedback"] < errors["rtn"]
    status, _, err = call("export", made / "pit", tmp_path / "x", "--quantizer", "magic")
    assert status == 2
    assert "rtn or feedback" in err


def test_search_for_precision(call: Call, made: Path, tmp_path: Path):
    status, out, err = call("export", made / "pit", tmp_path / "kl", "--max-kl", "0.02", "--json")
    assert status == 0, err
    report = json.loads(out)
    assert report["choice"]["kl"] <= 0.02
    bits = {entry.name: entry.bits for entry in Bundle.open(tmp_path / "kl").manifest.quantization}
    assert all(bits[name] == count for name, count in report["choice"]["bits"].items())
    limit = 400_000
    assert call("export", made / "pit", tmp_path / "bytes", "--max-bytes", limit)[0] == 0
    assert sum(f.stat().st_size for f in (tmp_path / "bytes").glob("model.onnx*")) <= limit
    for arguments, message in (
        (("--max-kl", "1e-12"), "the best reached is"),
        (("--max-kl", "0.1", "--max-bytes", "1000"), "exclude each other"),
        (("--max-kl", "nan"), "--max-kl nan"),
        (("--max-bytes", "1000"), "the smallest choice has"),
        (("--max-kl", "0.1", "--quantizer", "rtn"), "--quantizer feedback"),
    ):
        status, _, err = call("export", made / "pit", tmp_path / "x", *arguments)
        assert status == 2
        assert one_sentence(err), err
        assert message in err
    assert not (tmp_path / "x").exists()
