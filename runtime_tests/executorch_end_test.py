"""Where a text ends, and where it must not begin: end ids, context, tokenizers, in ExecuTorch's runtime and runner.

The model says the alphabet: after each byte's token it gives the next one, so that what to expect needs no model.
"""

import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, pre_tokenizers

pytest.importorskip("executorch.exir")
from pit_deploy import export, run
from pit_deploy.bundle import Bundle
from pit_deploy.errors import ContextFullError, InputError, PitDeployError
from pit_deploy.runtimes import open_runtime, open_text_runtime

CONTEXT = 16


def alphabet(make_checkpoint, **generation):
    """A checkpoint whose layer adds nothing and whose head answers a row of the embedding with the row after it."""
    directory = make_checkpoint(num_hidden_layers=1, tie_word_embeddings=False)
    tensors = load_file(directory / "model.safetensors")
    for name, value in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(value)
        elif value.ndim == 1:
            tensors[name] = np.ones_like(value)
    rows = len(tensors["lm_head.weight"])
    table = np.random.default_rng(0).choice([-1.0, 1.0], (rows, 64)).astype(np.float32)
    tensors["model.embed_tokens.weight"] = table
    tensors["lm_head.weight"] = np.roll(table, 1, axis=0)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def ids_of(directory, text):
    return Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids


@pytest.fixture(scope="module")
def bundle(make_checkpoint, tmp_path_factory):
    source = alphabet(make_checkpoint)
    (end,) = ids_of(source, "h")
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, end, 9]}))
    out = tmp_path_factory.mktemp("alphabet") / "bundle"
    export(source, out, to="executorch", weights="fp32", context=CONTEXT)
    return out


@pytest.mark.parametrize("runtime", [None, "executorch-runner"])
def test_a_text_ends_at_any_of_the_end_ids(bundle, runtime):
    answer = run(bundle, "ab", max_new_tokens=10, runtime=runtime, threads=1)
    assert (answer.text, answer.generation.finish_reason) == ("cdefg", "stop")
    answer = run(bundle, "ab", max_new_tokens=3, runtime=runtime, threads=1)
    assert (answer.text, answer.generation.finish_reason) == ("cde", "length")


def command(*arguments):
    line = [sys.executable, "-m", "pit_deploy.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def test_the_stock_runner_says_nothing_by_itself(bundle):
    """It can print what it generates, and its times, past Python."""
    line = ["run", bundle, "--prompt", "ab", "--max-new-tokens", 4, "--runtime", "executorch-runner"]
    assert command(*line).stdout.strip() == "cdef"
    for options in (line, line[:-2]):
        done = command(*options, "--json")
        assert json.loads(done.stdout)["text"] == "cdef" and done.stderr == ""


def test_a_token_that_is_part_of_a_character_is_refused_by_the_stock_runner_alone(bundle):
    """After "~" the alphabet of this tokenizer has the byte 0xA1, which begins nothing."""
    assert run(bundle, "|", max_new_tokens=2, runtime="executorch-runner", threads=1).text == "}~"
    with pytest.raises(PitDeployError, match="part of a character only; use --runtime executorch"):
        run(bundle, "|", max_new_tokens=4, runtime="executorch-runner", threads=1)
    assert run(bundle, "|", max_new_tokens=4, threads=1).text == "}~\ufffd\ufffd"


def test_a_checkpoint_without_an_end_id_is_refused(make_checkpoint, tmp_path):
    source = alphabet(make_checkpoint)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    tokenizer = json.loads((source / "tokenizer_config.json").read_text())
    del tokenizer["eos_token"]
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="eos_token_id"):
        export(source, tmp_path / "out", to="executorch", weights="fp32", context=CONTEXT)
    assert not (tmp_path / "out").exists()


def test_an_unknown_architecture_is_refused_with_the_known_ones(make_checkpoint, tmp_path):
    source = alphabet(make_checkpoint, eos_token_id=7)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "mamba", "architectures": ["M"]}))
    with pytest.raises(InputError, match=r"mamba.*llama.*qwen3"):
        export(source, tmp_path / "out", to="executorch", weights="fp32", context=CONTEXT)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("runtime", [None, "executorch-runner"])
def test_a_prompt_longer_than_the_context_is_refused_before_running(bundle, runtime):
    with pytest.raises(ContextFullError) as error:
        run(bundle, "a" * 20, max_new_tokens=1, runtime=runtime, threads=1)
    assert (error.value.needed, error.value.context_length) == (20, CONTEXT)


def test_a_second_turn_past_the_limit_is_refused_and_the_first_one_kept(bundle):
    runtime = open_runtime(Bundle.open(bundle), threads=1)
    first = ids_of(bundle, "abcdefghij")
    runtime.prefill(first)
    with pytest.raises(ContextFullError) as error:
        runtime.prefill(ids_of(bundle, "klmnopq"))
    assert (error.value.used, error.value.needed, error.value.context_length) == (10, 7, CONTEXT)
    assert runtime.position == 10
    logits = runtime.prefill(ids_of(bundle, "klmnop"))
    assert [int(logits.argmax())] == ids_of(bundle, "q")


def test_more_than_a_context_cannot_be_asked_of_an_export_or_a_runner(bundle, make_checkpoint, tmp_path):
    with pytest.raises(
        InputError, match="--context 1024 is more than the model's max_position_embeddings 320"
    ):
        export(make_checkpoint(), tmp_path / "out", to="executorch", context=1024)
    runner = open_text_runtime(Bundle.open(bundle), "executorch-runner", threads=1)
    with pytest.raises(ContextFullError) as error:
        runner.generate("ab", 1024)
    assert (error.value.used, error.value.needed, error.value.context_length) == (2, 1024, CONTEXT)
    done = command("run", bundle, "--prompt", "a" * 20)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "20" in done.stderr and "16" in done.stderr


LOOKAHEAD = r"\s+(?!\S)|\s+|[a-z](?=[a-z])|[^\s]"


def test_a_lookahead_in_the_tokenizer_is_checked_at_export_and_on_opening(make_checkpoint, tmp_path):
    """The runner reads the pattern as the model does, or the export says so and the runner is refused."""
    source = alphabet(make_checkpoint, eos_token_id=7)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LOOKAHEAD), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.save(str(source / "tokenizer.json"))
    report = export(source, tmp_path / "out", to="executorch", weights="fp32", context=CONTEXT)
    opened = Bundle.open(tmp_path / "out")
    for check in opened.manifest.tokenizer_checks:
        assert list(check.ids) == tokenizer.encode(check.text, add_special_tokens=False).ids
    notes = [note for note in report.notes if "ExecuTorch's tokenizer" in note]
    if notes:
        with pytest.raises(InputError, match=r"ExecuTorch's tokenizer .*use --runtime executorch"):
            open_text_runtime(opened, "executorch-runner", threads=1)
    else:
        runner = open_text_runtime(opened, "executorch-runner", threads=1)
        assert runner.generate("ab", 3) == "cde"
    assert run(tmp_path / "out", "ab", max_new_tokens=3, threads=1).text == "cde"
