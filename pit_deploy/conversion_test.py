from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.conversion import convert, mean_loss
from pit_deploy.errors import InputError
from pit_deploy.initialize import random_orthonormal
from pit_deploy.model import PITForCausalLM

Write = Callable[..., Path]
IDS = torch.tensor([[5, 200, 31, 7, 7, 120, 64, 99, 2, 45, 256, 18]])


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def _plain(directory: Path) -> Any:
    """The source in float32; an embedding's factor as training had it, in the precision of the checkpoint."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    scale = getattr(model.get_input_embeddings(), "embed_scale", None)
    if scale is not None:
        trained = transformers.AutoConfig.from_pretrained(directory).dtype
        scale.copy_(scale.to(trained))
    return model


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {n: c.read_torch(n) for c in [open_checkpoint(directory)] for n in c.tensors}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_source_keeps_its_function(
    tiny_checkpoint: Write, tmp_path: Path, family: str, dtype: str
) -> None:
    source = tiny_checkpoint(family, dtype=dtype)
    report = convert(source, tmp_path / "pit")
    model = PITForCausalLM.from_pretrained(tmp_path / "pit", dtype=torch.float32)
    assert (_logits(model) - _logits(_plain(source))).abs().max() < 1e-4
    assert report.max_logit_difference is not None and report.max_logit_difference < 1e-4
    assert report.loss == pytest.approx(report.loss_source, abs=1e-4)
    assert not report.lossy and (report.bridge, report.memory) == ("matrix", "stiefel")
    assert report.interface_error is not None and report.interface_error < 1e-5
    table = _plain(source).get_input_embeddings().weight.detach().double().numpy()
    assert report.condition == pytest.approx(np.linalg.cond(table), rel=1e-6)
    drift = np.linalg.norm(table.T @ table - np.eye(24)) / np.sqrt(24)
    assert report.interface_error_source == pytest.approx(drift, rel=1e-6)
    stored = {t.dtype for n, t in _tensors(tmp_path / "pit").items() if not n.startswith("pit.")}
    assert stored == {getattr(torch, dtype)}, "the backbone is carried as it was stored"
    json.dumps(report.to_dict())


def test_strict_keeps_the_head(tiny_checkpoint: Write, tmp_path: Path) -> None:
    source = tiny_checkpoint()
    report = convert(source, tmp_path / "pit", bridge=False)
    assert (report.bridge, report.lossy, report.bridge_residual) == ("none", True, None)
    model = PITForCausalLM.from_pretrained(tmp_path / "pit")
    table = _plain(source).get_input_embeddings().weight.detach()
    states = torch.randn(9, 24, generator=torch.Generator().manual_seed(1))
    assert (model.pit.logits(states) - states @ table.T).abs().max() < 1e-5
    expected = np.linalg.pinv(table.double().numpy()).T
    assert np.abs(model.pit.embed(torch.arange(263)).detach().numpy() - expected).max() < 1e-4


def test_an_untied_source_is_joined_by_least_squares(tiny_checkpoint: Write, tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen2", tied=False)
    report = convert(source, tmp_path / "pit")
    tensors = _tensors(source)
    embedding = tensors["model.embed_tokens.weight"].double().numpy()
    head = tensors["lm_head.weight"].double().numpy()
    dual = np.linalg.pinv(head).T  # Z T⁻¹
    bridge, squares, *_ = np.linalg.lstsq(dual, embedding, rcond=None)
    assert (
        np.abs(_tensors(tmp_path / "pit")["pit.bridge"].numpy() - bridge).max() < 1e-5 * np.abs(bridge).max()
    )
    residual = np.sqrt(squares.sum() / (embedding**2).sum())
    assert report.bridge_residual == pytest.approx(residual, rel=1e-6)
    assert report.lossy and report.loss is not None and report.loss_source is not None
    (note,) = [n for n in report.notes if "lossy" in n]
    assert f"{residual:.1%} of the embedding" in note
    drift = np.linalg.norm(head.T @ embedding - np.eye(24)) / np.sqrt(24)
    assert report.interface_error_source == pytest.approx(drift, rel=1e-6)
    states = torch.randn(5, 24)
    found = PITForCausalLM.from_pretrained(tmp_path / "pit").pit.logits(states)
    assert (found - states @ tensors["lm_head.weight"].T).abs().max() < 1e-4, "the head is exact"


def test_an_untied_source_whose_tables_one_bridge_joins(tiny_checkpoint: Write, tmp_path: Path) -> None:
    source = tiny_checkpoint(tied=False)
    tensors = _tensors(source)
    mix = torch.randn(24, 24, generator=torch.Generator().manual_seed(2))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] @ mix
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = convert(source, tmp_path / "pit")
    assert report.bridge_residual is not None and report.bridge_residual < 1e-5
    model = PITForCausalLM.from_pretrained(tmp_path / "pit")
    assert (_logits(model) - _logits(_plain(source))).abs().max() < 1e-3


def test_added_tokens_whose_rows_were_never_trained(tiny_checkpoint: Write, tmp_path: Path) -> None:
    source = tiny_checkpoint(vocab_size=2001)
    tensors = _tensors(source)
    table = tensors["model.embed_tokens.weight"]
    added = 1e-4 * torch.randn(5, 24, generator=torch.Generator().manual_seed(3))
    tensors["model.embed_tokens.weight"] = torch.cat([table, added])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 2006}))
    expected = _logits(_plain(source))
    report = convert(source, tmp_path / "pit")
    assert report.outlier_rows == [2001, 2002, 2003, 2004, 2005]
    assert any("5 rows of model.embed_tokens.weight stand out" in note for note in report.notes)
    found = _logits(PITForCausalLM.from_pretrained(tmp_path / "pit"))
    assert (found - expected).abs().max() < 1e-4


def test_companions_survive_byte_for_byte(tiny_checkpoint: Write, tmp_path: Path) -> None:
    source = tiny_checkpoint()
    carried = {
        "generation_config.json": '{"eos_token_id": [1, 106],  "temperature": 0.60, "unknown": {"a": null}}',
        "chat_template.jinja": "{{ messages }}",
        "LICENSE": "Apache\r\n",
        "README.md": "---\nlicense: mit\n---\n",
        "tokenizer_config.json": '{"eos_token": "<|end|>"}',
    }
    for name, text in carried.items():
        (source / name).write_bytes(text.encode())
    convert(source, tmp_path / "pit", check=False)
    for name, text in carried.items():
        assert (tmp_path / "pit" / name).read_bytes() == text.encode()
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(b"sentencepiece")
    report = convert(source, tmp_path / "other")
    assert any("no tokenizer.json, so the conversion was not checked" in note for note in report.notes)
    for name in (*carried, "tokenizer.model"):
        assert (tmp_path / "other" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("bridge", [True, False])
def test_random_keeps_a_backbone_that_is_there(tiny_checkpoint: Write, tmp_path: Path, bridge: bool) -> None:
    source = tiny_checkpoint("gemma2")
    report = convert(source, tmp_path / "pit", init="random", bridge=bridge, memory="frozen", seed=5)
    tensors, before = _tensors(tmp_path / "pit"), _tensors(source)
    assert all(torch.equal(tensors[n], t) for n, t in before.items() if n != "model.embed_tokens.weight")
    assert np.array_equal(tensors["pit.memory"].numpy(), random_orthonormal(263, 24, seed=5))
    transform = tensors["pit.cholesky"] @ tensors["pit.cholesky"].T
    assert torch.allclose(transform, (263 / 24) ** 0.5 / 2 * torch.eye(24), atol=1e-6)
    assert report.bridge == ("scalar" if bridge else "none")
    if bridge:
        assert tensors["pit.embedding_multiplier"].shape == ()
        assert tensors["pit.embedding_multiplier"].item() == pytest.approx(2 * 263 / 24)
    assert PITForCausalLM.from_pretrained(tmp_path / "pit").pit.memory_kind == "frozen"
    assert report.lossy


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_from_scratch(tiny_checkpoint: Write, tmp_path: Path, family: str) -> None:
    source = tiny_checkpoint(family)
    (source / "model.safetensors").unlink()
    with pytest.raises(InputError, match="has no weights"):
        convert(source, tmp_path / "pit")
    state = torch.random.get_rng_state()
    convert(source, tmp_path / "pit", init="random", dtype="bfloat16", seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    report = convert(source, tmp_path / "again", init="random", dtype="bfloat16", seed=1)
    assert (tmp_path / "pit" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()
    assert report.interface_error is not None and report.interface_error < 1e-5
    assert "the source has no weights: the backbone is random" in report.notes
    model = PITForCausalLM.from_pretrained(tmp_path / "pit")
    assert next(model.backbone.parameters()).dtype == torch.bfloat16
    loss = model.float()(input_ids=IDS, labels=IDS).loss.item()
    assert loss == pytest.approx(np.log(263), abs=1.5)
    assert (tmp_path / "pit" / "tokenizer.json").exists()


def test_a_pit_model_trained_elsewhere(tiny_checkpoint: Write, tmp_path: Path) -> None:
    source = tiny_checkpoint()
    tensors = _tensors(source)
    del tensors["model.embed_tokens.weight"]
    memory = torch.from_numpy(random_orthonormal(263, 24, seed=9))
    square = torch.randn(24, 24, generator=torch.Generator().manual_seed(4))
    transform = square @ square.T + torch.eye(24)
    keys = {"memory_key": "their.Z", "cholesky_key": "their.L"}
    for number, (z, lower, note) in enumerate(
        [
            (memory, torch.linalg.cholesky(transform), None),
            (memory, transform, "symmetric: it is taken as T"),
            (memory.bfloat16(), torch.linalg.cholesky(transform), "re-orthonormalised"),
        ]
    ):
        save_file({**tensors, "their.Z": z, "their.L": lower.contiguous()}, source / "model.safetensors")
        report = convert(source, tmp_path / f"pit{number}", **keys)
        assert report.init == "given" and (note is None or any(note in n for n in report.notes))
        pit = PITForCausalLM.from_pretrained(tmp_path / f"pit{number}").pit
        assert torch.allclose(pit.transform(), transform, rtol=1e-4, atol=1e-3)
        assert (pit.memory - memory).abs().max() < 2e-3
    for z, lower, message in (
        (2 * memory, transform, "away from orthonormal .* not a PIT memory"),
        (memory, torch.ones(24, 24), "not positive definite"),
        (memory, torch.triu(transform), "lower triangular"),
        (memory, torch.ones(23, 23), r"\[263, 24\] and their.L \[23, 23\] do not fit"),
        (memory, transform * torch.nan, "not finite"),
    ):
        save_file({**tensors, "their.Z": z, "their.L": lower.contiguous()}, source / "model.safetensors")
        with pytest.raises(InputError, match=message):
            convert(source, tmp_path / "broken", **keys)
    with pytest.raises(InputError, match="the tensor absent is missing"):
        convert(source, tmp_path / "broken", memory_key="absent", cholesky_key="their.L")
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": "magic"}, "--init magic is not known; choose polar or random"),
        ({"memory": "soft"}, "--memory soft is not known"),
        ({"dtype": "int3"}, "--dtype int3 is not known; choose float32, float16, bfloat16"),
        ({"memory_key": "a"}, "belong together"),
        ({"memory_key": "a", "cholesky_key": "b", "init": "random"}, "exclude each other"),
    ],
)
def test_options_are_checked_before_any_work(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        convert(tmp_path / "nowhere", tmp_path / "out", **options)


def test_unusable_sources_leave_nothing(tiny_checkpoint: Write, tmp_path: Path) -> None:
    source = tiny_checkpoint()
    good = _tensors(source)

    def fails(message: str, out: str = "out", **tensors: torch.Tensor) -> None:
        named = {k.replace("__", "."): v for k, v in tensors.items()}
        save_file({**good, **named}, source / "model.safetensors", metadata={"format": "pt"})
        before = sorted(p.name for p in tmp_path.iterdir())
        with pytest.raises(InputError, match=message):
            convert(source, tmp_path / out)
        assert sorted(p.name for p in tmp_path.iterdir()) == before

    table = good["model.embed_tokens.weight"]
    broken = table.clone()
    broken[100, 3] = torch.nan
    fails(r"1 values that are not finite, the first at \[100, 3\]", model__embed_tokens__weight=broken)
    fails("rank deficient", model__embed_tokens__weight=table[:, :1].repeat(1, 24))
    fails("lm_head.bias is a bias on the logits", lm_head__bias=torch.ones(263))
    fails(
        r"1 not part of this architecture \(model.layers.0.surplus", model__layers__0__surplus=torch.ones(3)
    )
    few = {**json.loads((source / "config.json").read_text()), "vocab_size": 20}
    (source / "tokenizer.json").unlink()
    (source / "config.json").write_text(json.dumps(few))
    fails("has 20 rows and 24 columns", model__embed_tokens__weight=table[:20].clone())


def test_outputs(tiny_checkpoint: Write, tmp_path: Path) -> None:
    source = tiny_checkpoint()
    convert(source, tmp_path / "pit", check=False)
    with pytest.raises(InputError, match="exists already"):
        convert(source, tmp_path / "pit", check=False)
    with pytest.raises(InputError, match="is or holds the input"):
        convert(source, source, overwrite=True)
    with pytest.raises(InputError, match="is a pit checkpoint already"):
        convert(tmp_path / "pit", tmp_path / "twice")
    convert(source, tmp_path / "pit", check=False, bridge=False, overwrite=True)
    assert open_checkpoint(tmp_path / "pit").config["pit"]["bridge"] == "none"


def test_float16_that_overflows_is_refused(tiny_checkpoint: Write, tmp_path: Path) -> None:
    source = tiny_checkpoint()
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model.norm.weight reaches 1e\+05, which is not a finite float16"):
        convert(source, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_mean_loss_equals_cross_entropy() -> None:
    logits = 20 * torch.randn(9, 33, generator=torch.Generator().manual_seed(1))
    ids = list(range(3, 12))
    expected = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]))
    assert mean_loss(logits.numpy(), ids) == pytest.approx(expected.item(), rel=1e-12)
    assert np.isnan(mean_loss(logits[:1].numpy(), ids[:1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_backbone_that_is_not_finite_is_refused(
    tiny_checkpoint: Write, tmp_path: Path, dtype: str, value: float
) -> None:
    source = tiny_checkpoint(dtype=dtype)
    tensors = _tensors(source)
    tensors["model.layers.1.mlp.up_proj.weight"][7, 3:5] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for check in (True, False):
        with pytest.raises(
            InputError, match=r"plain: model.layers.1.mlp.up_proj.weight holds 2 .* first at \[7, 3\]"
        ):
            convert(source, tmp_path / "out", check=check)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_headers_are_compared_with_the_config_before_anything_is_built(
    tiny_checkpoint: Write, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_checkpoint(family)
    config = json.loads((source / "config.json").read_text())
    layers, width = ("n_layer", "n_embd") if family == "gpt2" else ("num_hidden_layers", "hidden_size")
    inner = "n_inner" if family == "gpt2" else "intermediate_size"
    monkeypatch.setattr(np.linalg, "eigh", None)  # the first thing that costs time
    for fields, message in (
        ({layers: 100_000}, f"says {layers} 100000, and the weights have 2 layers"),
        ({layers: 10**9}, f"says {layers} 1000000000"),
        ({layers: 1, "layer_types": None}, "not part of this architecture"),
        ({width: 10**6}, r"has shape \[263, 24\], config.json asks for \[vocab_size, 1000000\]"),
        ({inner: 10**9}, r"of another shape \(.*1000000000"),
    ):
        (source / "config.json").write_text(json.dumps({**config, **fields}))
        with pytest.raises(InputError, match=message) as caught:
            convert(source, tmp_path / "out")
        assert "partial" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "banana"}}, "'banana' is not known; known are default, linear"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su' is not known; known are default, linear"),
        ({"rope_parameters": None, "rope_theta": "abc"}, "rope_theta is 'abc'"),
        ({"rope_parameters": None, "rope_theta": None}, "rope_theta is None"),
        ({"rope_parameters": {"rope_theta": -5}}, "rope_theta is -5"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1, "factor": 2.0}}, "rope_theta is 1;"),
        ({"hidden_act": "swiglu"}, "hidden_act 'swiglu'"),
        ({"head_dim": -8}, "transformers cannot build this model"),
    ],
)
@pytest.mark.parametrize("init", ["polar", "random"])
def test_words_and_numbers_that_no_model_has(
    tiny_checkpoint: Write, tmp_path: Path, fields: dict[str, Any], message: str, init: str
) -> None:
    source = tiny_checkpoint()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **fields}))
    if init == "random":
        (source / "model.safetensors").unlink()
    with pytest.raises(InputError, match=message):
        convert(source, tmp_path / "out", init=init)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "[]"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_companions_that_a_later_command_would_refuse(
    tiny_checkpoint: Write, tmp_path: Path, name: str, text: str
) -> None:
    source = tiny_checkpoint()
    (source / name).write_text(text)
    with pytest.raises(InputError, match=rf"{name} (is not valid JSON|holds a JSON list)"):
        convert(source, tmp_path / "out", check=False)


def test_scratch_of_a_table_that_no_disk_holds(tiny_checkpoint: Write, tmp_path: Path) -> None:
    source = tiny_checkpoint()
    (source / "model.safetensors").unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 10**12}))
    with pytest.raises(InputError, match=r"needs about .* MB"):
        convert(source, tmp_path / "out", init="random")
