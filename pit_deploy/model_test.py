from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pit_deploy.checkpoint import open_checkpoint
from pit_deploy.conversion import convert
from pit_deploy.errors import InputError
from pit_deploy.initialize import polar, random_orthonormal
from pit_deploy.interface import PITInterface
from pit_deploy.model import PITForCausalLM

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2"]
IDS = torch.tensor([[5, 200, 31, 7, 7, 120, 64, 99, 2, 45, 256, 18]])
Make = Callable[..., Any]


def _wrap(backbone: Any, bridge: bool = True, memory: str = "stiefel") -> PITForCausalLM:
    """A PIT model that computes what the tied `backbone` computes, made without pit_deploy.conversion."""
    table = backbone.get_input_embeddings().weight.detach().double().numpy()
    factors = polar(table, dtype=np.float64)
    square = torch.from_numpy(factors.transform)
    interface = PITInterface(
        torch.from_numpy(factors.memory).float(),
        torch.linalg.cholesky(square).float(),
        (square @ square).float() if bridge else None,
        memory_kind=memory,
    )
    return PITForCausalLM(backbone, interface).eval()


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor = IDS, **options: Any) -> torch.Tensor:
    return model(input_ids=ids, **options).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_bridge_conversion_keeps_the_logits_and_survives_the_disk(
    tiny: Make, tmp_path: Path, family: str
) -> None:
    expected = _logits(tiny(family))
    model = _wrap(tiny(family))
    found = _logits(model)
    assert (found - expected).abs().max() < 1e-4
    assert (expected.max(-1).values - expected.median(-1).values).min() > 0.5, "the logits say something"
    model.save_pretrained(tmp_path / "pit")
    again = PITForCausalLM.from_pretrained(tmp_path / "pit")
    assert torch.equal(_logits(again), found)
    state = model.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "pit" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_generate(tiny: Make, family: str) -> None:
    plain, model = tiny(family, seed=6), _wrap(tiny(family, seed=6))
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    expected = plain.generate(IDS, **options)
    assert torch.equal(model.generate(IDS, **options), expected)
    assert torch.equal(model.generate(IDS, use_cache=False, **options), expected)
    assert len(set(expected[0, IDS.shape[1] :].tolist())) > 1


def test_left_padding(tiny: Make) -> None:
    model = _wrap(tiny("llama"))
    short = IDS[:, :5]
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), short], dim=1)
    batch, mask = torch.cat([IDS, padded]), torch.ones(2, 12, dtype=torch.long)
    mask[1, :7] = 0
    options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
    found = model.generate(batch, attention_mask=mask, **options)
    assert torch.equal(found[0, 12:], model.generate(IDS, **options)[0, 12:])
    assert torch.equal(found[1, 12:], model.generate(short, **options)[0, 5:])


def test_labels_give_the_mean_loss(tiny: Make) -> None:
    model = _wrap(tiny("llama"))
    found = model(input_ids=IDS, labels=IDS).loss
    logits = _logits(model)[0, :-1].double()
    expected = -torch.log_softmax(logits, -1)[torch.arange(11), IDS[0, 1:]].mean()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_bf16_backbone_with_a_float32_interface(tiny: Make, tmp_path: Path, family: str) -> None:
    model = _wrap(tiny(family))
    exact = _logits(model)
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.pit.parameters()} == {torch.float32}
    assert {p.dtype for p in model.backbone.parameters()} == {torch.bfloat16}
    found = _logits(model)
    assert found.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 0.2 * exact.abs().max()
    model.save_pretrained(tmp_path / "pit")
    again = PITForCausalLM.from_pretrained(tmp_path / "pit")
    assert next(again.backbone.parameters()).dtype == torch.bfloat16
    # `to` rounds the frequencies of the rotary embedding, which the files do not hold.
    assert (_logits(again) - found).abs().max() < 0.1 * exact.abs().max()
    wide = PITForCausalLM.from_pretrained(tmp_path / "pit", dtype=torch.float32)
    assert next(wide.backbone.parameters()).dtype == torch.float32
    # A bf16 Gemma rounds its embedding scale too.
    assert (_logits(again.float()) - _logits(wide)).abs().max() <= (5e-2 if family == "gemma3_text" else 0)


def test_a_plain_loader_refuses_a_pit_directory(tiny: Make, tmp_path: Path) -> None:
    _wrap(tiny("llama")).save_pretrained(tmp_path / "pit")
    with pytest.raises(ValueError, match="pit"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pit")
    stored = load_file(tmp_path / "pit" / "model.safetensors")
    assert not [name for name in stored if "embed" in name or "head" in name]
    assert torch.equal(stored["pit.cholesky"], torch.tril(stored["pit.cholesky"]))
    table = tiny("llama").get_input_embeddings().weight.detach()
    head = stored["pit.memory"] @ stored["pit.cholesky"] @ stored["pit.cholesky"].T
    assert (head - table).abs().max() < 1e-5, "L is saved as L"


@pytest.mark.parametrize("memory", ["frozen", "stiefel"])
def test_a_training_step(tiny: Make, memory: str) -> None:
    model = _wrap(tiny("llama"), memory=memory).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.gradient_checkpointing_enable()
    model(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3).step()
    still = {name for name, value in model.state_dict().items() if torch.equal(value, before[name])}
    assert still == {"pit.cholesky_anchor"} | ({"pit.memory"} if memory == "frozen" else set())


def test_saving_into_a_trainers_directory(tiny: Make, tmp_path: Path) -> None:
    """What else is there stays; a failure leaves the old weights; old shards do not outlive the new file."""
    model = _wrap(tiny("llama"))
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / "optimizer.pt").touch()
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    model.save_pretrained(tmp_path, state_dict=model.state_dict(), safe_serialization=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint-5",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(KeyError):
        model.save_pretrained(tmp_path, state_dict={"pit.memory": torch.zeros(2, 2)})
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert torch.equal(_logits(PITForCausalLM.from_pretrained(tmp_path)), _logits(model))
    model.save_pretrained(tmp_path / "nothing", is_main_process=False)
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(InputError, match="push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    with pytest.raises(InputError, match="exists already"):
        model.save_pretrained(tmp_path, overwrite=False)


def test_trainer_of_transformers(tiny: Make, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = _wrap(tiny("llama"), memory="frozen")
    arguments = transformers.TrainingArguments(
        tmp_path,
        max_steps=1,
        save_steps=1,
        report_to=[],
        use_cpu=True,
        logging_strategy="no",
        disable_tqdm=True,
    )
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "checkpoint-1" / "optimizer.pt").exists()
    for place in (tmp_path, tmp_path / "checkpoint-1"):
        assert torch.equal(_logits(PITForCausalLM.from_pretrained(place)), _logits(model.eval()))


def test_a_drifted_memory_is_reorthonormalised_with_a_note(tiny: Make, tmp_path: Path) -> None:
    model = _wrap(tiny("llama"))
    expected = _logits(model)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["pit.memory"] = tensors["pit.memory"].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(tmp_path)
    again = PITForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert again.pit.interface_error() < 1e-5
    assert again.pit.memory.dtype == torch.float32
    assert (_logits(again) - expected).abs().max() < 0.1 * expected.abs().max()
    (note,) = checkpoint.notes
    assert "pit.memory was" in note and "re-orthonormalised to" in note
    tensors["pit.memory"] = tensors["pit.memory"] * 1.1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"pit.memory are 0.2\d+ away from orthonormal \(limit 0.01\)"):
        PITForCausalLM.from_pretrained(tmp_path)


def test_missing_and_unexpected_tensors_are_named_all_at_once(tiny: Make, tmp_path: Path) -> None:
    _wrap(tiny("llama")).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    save_file({**tensors, "surplus": torch.ones(1)}, file)
    with pytest.raises(
        InputError,
        match=r"missing: model.layers.1.mlp.up_proj.weight, model.norm.weight; unexpected: surplus",
    ):
        PITForCausalLM.from_pretrained(tmp_path)
    tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"] = (
        torch.ones(23),
        torch.ones(40, 24),
    )
    save_file(tensors, file)
    with pytest.raises(InputError, match=r"model.norm.weight has shape \[23\], its config asks for \[24\]"):
        PITForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": "pit.cholesky"}, "pit.cholesky are missing"),
        ({"drop": "pit.bridge"}, "pit.bridge are missing"),
        (
            {"bridge": "none"},
            "says pit.bridge none, which goes with no tensor, and the checkpoint has pit.bridge",
        ),
        ({"bridge": "oval"}, "pit.bridge is 'oval'; it must be none or scalar or matrix"),
        ({"memory": "liquid"}, "pit.memory is 'liquid'"),
        ({"version": 2}, "pit.version is 2 and this pit-deploy reads up to 1"),
        ({"version": None}, "must be an object with a version number"),
        ({"pit.cholesky": torch.ones(24, 24)}, "lower triangular with a positive diagonal"),
        ({"pit.cholesky": -torch.eye(24)}, "smallest diagonal entry -1"),
        ({"pit.cholesky": torch.eye(23)}, r"pit.memory is \[263, 24\] and pit.cholesky \[23, 23\]"),
        ({"pit.bridge": torch.full((24, 24), torch.nan)}, "576 values that are not finite"),
        ({"pit.memory": torch.ones(24)}, r"has shape \[24\]"),
        ({"backbone_model_type": "squid"}, "transformers has no causal language model of model_type 'squid'"),
    ],
)
def test_broken_pit_checkpoints(tiny: Make, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    _wrap(tiny("llama")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    for key, value in change.items():
        if key == "drop":
            del tensors[value]
        elif isinstance(value, torch.Tensor):
            tensors[key] = value
        else:
            config["pit"][key] = value
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        PITForCausalLM.from_pretrained(tmp_path)


def test_other_refusals(tiny_checkpoint: Callable[..., Path], tiny: Make, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a PIT checkpoint; run pit-deploy convert"):
        PITForCausalLM.from_pretrained(tiny_checkpoint())
    with pytest.raises(InputError, match="cannot be resized"):
        _wrap(tiny("llama")).resize_token_embeddings(300)


def test_a_generation_config_that_transformers_would_not_write(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_checkpoint()
    text = '{"do_sample": false, "temperature": 0.6, "eos_token_id": [1, 106], "top_p": 0.9,\n "our_field": [1]}\n'
    (source / "generation_config.json").write_text(text)
    convert(source, tmp_path / "pit", check=False)
    assert (tmp_path / "pit" / "generation_config.json").read_text() == text
    model = PITForCausalLM.from_pretrained(tmp_path / "pit")
    assert model.generation_config.eos_token_id == [1, 106]
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["temperature"] == 0.6 and saved["our_field"] == [1]
    shutil.rmtree(tmp_path / "saved")


def test_a_random_interface(tiny: Make) -> None:
    memory = torch.from_numpy(random_orthonormal(263, 24))
    model = PITForCausalLM(tiny("llama"), PITInterface(memory, torch.eye(24), 263 / 24))
    assert model.config.vocab_size == 263 and model.pit.bridge_kind == "scalar"
    embedding = model.get_input_embeddings()(IDS)
    assert embedding.norm(dim=-1).square().mean().sqrt().item() == pytest.approx((263 / 24) ** 0.5, rel=0.2)
