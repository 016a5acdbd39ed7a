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
from pit_deploy.conversion import convert
from pit_deploy.errors import InputError
from pit_deploy.folding import (
    FoldedModel,
    SharedTable,
    UntiedTables,
    fold,
    fold_checkpoint,
    load_folded,
    separate,
    with_tables,
    write_folded,
)
from pit_deploy.model import PITForCausalLM
from pit_deploy.runtimes.torch import open_folded, open_plain, open_training

Write = Callable[..., Path]
IDS = [5, 200, 31, 7, 7, 120, 64, 99, 2, 45, 256, 18]
CONVERSIONS: dict[str, dict[str, Any]] = {
    "matrix": {},
    "none": {"bridge": False},
    "scalar": {"init": "random"},
}


@pytest.fixture
def pit(tiny_checkpoint: Write, tmp_path: Path) -> Write:
    """Convert a tiny model, and return the PIT checkpoint."""

    def make(family: str = "llama", conversion: str = "matrix", **options: Any) -> Path:
        out = tmp_path / "pit"
        convert(tiny_checkpoint(family, **options), out, check=False, **CONVERSIONS[conversion])
        return out

    return make


def _stored(directory: Path) -> dict[str, np.ndarray]:
    return {n: t.double().numpy() for n, t in load_file(directory / "model.safetensors").items()}


@pytest.mark.parametrize("conversion", list(CONVERSIONS))
@pytest.mark.parametrize(("family", "offset"), [("llama", 0.0), ("gemma2", 1.0), ("gpt2", None)])
def test_the_fold_is_the_training_time_forward_in_float64(
    pit: Write, family: str, offset: float | None, conversion: str
) -> None:
    """Against the definition, written out with numpy's own solves: 1e-10 before anything is rounded."""
    directory = pit(family, conversion)
    stored = _stored(directory)
    z, lower = stored["pit.memory"], stored["pit.cholesky"]
    embedding = np.linalg.solve(lower.T, np.linalg.solve(lower, z.T)).T
    if conversion == "matrix":
        embedding = embedding @ stored["pit.bridge"]
    if conversion == "scalar":
        embedding = embedding * stored["pit.embedding_multiplier"]
    gain = np.ones(24) if offset is None else offset + stored["model.norm.weight"]
    normalised = np.random.default_rng(3).standard_normal((6, 24))
    logits = ((normalised * gain) @ lower @ lower.T) @ z.T

    model = fold_checkpoint(open_checkpoint(directory), "shared")
    tables = model.tables
    assert (
        isinstance(tables, SharedTable) and tables.head_map is not None and tables.embedding_map is not None
    )
    table = tables.table.astype(np.float64)
    scale = np.abs(embedding).max()
    assert np.abs(table @ tables.embedding_map - embedding).max() < 1e-10 * scale
    assert np.abs((normalised @ tables.head_map.T) @ table.T - logits).max() < 1e-10 * np.abs(logits).max()
    untied = separate(tables)
    assert np.abs(untied.embedding - embedding).max() < 1e-6 * scale
    assert np.abs(normalised @ untied.head.T.astype(np.float64) - logits).max() < 1e-5 * np.abs(logits).max()
    norm = model.overrides.get("model.norm.weight")
    assert (norm is None) if offset is None else np.array_equal(norm, np.full(24, 1 - offset))
    expected = ["transform", *{"matrix": ["bridge"], "scalar": ["embedding_multiplier"]}.get(conversion, [])]
    assert model.folds == expected + (["final_norm_gain"] if offset is not None else [])


def test_shared_equals_untied_for_any_basis(pit: Write, rng: np.random.Generator) -> None:
    """`M = Z A` for a random `A`, neither symmetric nor orthogonal, with the transposes of pit-math section 5."""
    checkpoint = open_checkpoint(pit())
    model = fold_checkpoint(checkpoint, "shared")
    tables = model.tables
    assert isinstance(tables, SharedTable)
    basis = rng.standard_normal((24, 24)) + 2 * np.eye(24)
    inverse = np.linalg.inv(basis)
    mixed = SharedTable(
        (tables.table @ basis).astype(np.float32), inverse @ tables.head_map, inverse @ tables.embedding_map
    )
    untied = fold_checkpoint(checkpoint, "untied").tables
    found = separate(mixed)
    assert isinstance(untied, UntiedTables)
    assert np.abs(found.embedding - untied.embedding).max() < 2e-5 * np.abs(untied.embedding).max()
    assert np.abs(found.head - untied.head).max() < 2e-5 * np.abs(untied.head).max()
    changed = with_tables(model, mixed, "test_basis")
    assert changed.folds == [*model.folds, "test_basis"] and model.folds[-1] != "test_basis"
    expected = open_training(checkpoint).all_logits(IDS)
    assert np.abs(open_folded(changed, tokenizer_length=257).all_logits(IDS) - expected).max() < 1e-3


@pytest.mark.parametrize("layout", ["untied", "shared"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2"])
def test_a_folded_directory_computes_the_same(pit: Write, tmp_path: Path, family: str, layout: str) -> None:
    directory = pit(family)
    expected = open_training(open_checkpoint(directory)).all_logits(IDS)
    fold(directory, tmp_path / "folded", layout=layout)
    checkpoint = open_checkpoint(tmp_path / "folded")
    assert (checkpoint.kind, checkpoint.layout, checkpoint.tied) == ("folded", layout, False)
    assert checkpoint.config["pit_fold"]["folds"][0] == "transform"
    assert "pit" not in checkpoint.config
    found = open_folded(load_folded(checkpoint), tokenizer_length=257).all_logits(IDS)
    assert np.abs(found - expected).max() < 1e-4
    if layout == "untied":
        plain = open_plain(checkpoint)
        assert np.abs(plain.all_logits(IDS) - expected).max() < 1e-4
        assert type(plain.model) is type(PITForCausalLM.from_pretrained(directory).backbone)
    else:
        with pytest.raises(ValueError, match="pit_folded"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folded")
        with pytest.raises(InputError, match="transformers cannot load"):
            open_plain(checkpoint)
        wide = open_folded(load_folded(checkpoint, "untied"), tokenizer_length=257)
        assert np.abs(wide.all_logits(IDS) - expected).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["untied", "shared"])
def test_dtypes(pit: Write, tmp_path: Path, layout: str, dtype: str) -> None:
    directory = pit("llama", dtype="bfloat16")
    fold(directory, tmp_path / "folded", layout=layout, dtype=dtype)
    stored = load_file(tmp_path / "folded" / "model.safetensors")
    maps = {n for n in stored if n.endswith("_map")}
    assert {t.dtype for n, t in stored.items() if n not in maps} == {getattr(torch, dtype)}
    assert {stored[n].dtype for n in maps} <= {torch.float32}
    assert json.loads((tmp_path / "folded" / "config.json").read_text())["dtype"] == dtype
    exact = fold_checkpoint(open_checkpoint(directory), layout)
    rounded = load_folded(open_checkpoint(tmp_path / "folded"))
    a = exact.tables.table if isinstance(exact.tables, SharedTable) else exact.tables.head
    b = rounded.tables.table if isinstance(rounded.tables, SharedTable) else rounded.tables.head
    assert np.array_equal(torch.from_numpy(a).to(getattr(torch, dtype)).float().numpy(), b), "cast once, last"


def test_folding_twice_is_refused(pit: Write, tmp_path: Path, tiny_checkpoint: Write) -> None:
    directory = pit()
    for layout in ("untied", "shared"):
        fold(directory, tmp_path / layout, layout=layout)
        with pytest.raises(
            InputError, match=rf"folded already \({layout}; transform, bridge, final_norm_gain\)"
        ):
            fold(tmp_path / layout, tmp_path / "twice")
        with pytest.raises(InputError, match="is a folded checkpoint already"):
            convert(tmp_path / layout, tmp_path / "twice")
    with pytest.raises(InputError, match=r"not a PIT checkpoint .*run pit-deploy convert first"):
        fold(tiny_checkpoint(), tmp_path / "twice")
    assert not (tmp_path / "twice").exists()


def test_refusals_before_any_work(pit: Write, tmp_path: Path) -> None:
    directory = pit()
    for options, message in (
        ({"layout": "round"}, "--layout round is not known; choose untied or shared"),
        ({"dtype": "int8"}, "--dtype int8 is not known"),
    ):
        with pytest.raises(InputError, match=message):
            fold(tmp_path / "nowhere", tmp_path / "out", **options)
    with pytest.raises(InputError, match="is or holds the input"):
        fold(directory, directory, overwrite=True)
    with pytest.raises(InputError, match="exists already"):
        fold(directory, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.inf
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(InputError, match=r"model.norm.weight holds 1 values that are not finite"):
        fold(directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_fold_starts_from_the_same_memory_as_training(pit: Write) -> None:
    """A memory that a save in bf16 has moved is put right in both, or they would differ."""
    directory = pit()
    tensors = load_file(directory / "model.safetensors")
    tensors["pit.memory"] = tensors["pit.memory"].bfloat16()
    save_file(tensors, directory / "model.safetensors")
    checkpoint = open_checkpoint(directory)
    expected = open_training(checkpoint).all_logits(IDS)
    found = open_folded(fold_checkpoint(checkpoint, "untied"), tokenizer_length=257).all_logits(IDS)
    assert np.abs(found - expected).max() < 1e-4
    assert len(checkpoint.notes) == 1 and "re-orthonormalised" in checkpoint.notes[0]


def test_plain_checkpoints_as_they_are(tiny_checkpoint: Write, tmp_path: Path) -> None:
    tied = open_checkpoint(tiny_checkpoint(name="tied"))
    untied = open_checkpoint(tiny_checkpoint(name="untied", tied=False))
    assert load_folded(tied).layout == "shared"
    assert load_folded(untied).layout == "untied"
    with pytest.raises(
        InputError, match="tie_word_embeddings false and the checkpoint has two different tables"
    ):
        load_folded(untied, "shared")
    for checkpoint, layout in ((tied, "shared"), (tied, "untied"), (untied, "untied")):
        model = load_folded(checkpoint, layout)
        assert model.folds == []
        expected = open_plain(checkpoint).all_logits(IDS)
        assert np.abs(open_folded(model, tokenizer_length=257).all_logits(IDS) - expected).max() < 1e-5
    write_folded(load_folded(tied, "untied"), tmp_path / "two")
    stored = load_file(tmp_path / "two" / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
    assert open_plain(open_checkpoint(tmp_path / "two")).model.lm_head.weight.shape == (263, 24)


def test_a_plain_checkpoint_that_lacks_a_tensor_is_not_made_up(tiny_checkpoint: Write) -> None:
    source = tiny_checkpoint()
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:20].clone()
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"layers.0.mlp.up_proj.weight|model.norm.weight"):
        open_plain(open_checkpoint(source))
    model = load_folded(open_checkpoint(source))
    with pytest.raises(InputError, match=r"the tensor model.layers.0.mlp.up_proj.weight is missing"):
        open_folded(model)


def test_generation_config_through_convert_and_fold(
    pit: Write, tiny_checkpoint: Write, tmp_path: Path
) -> None:
    text = '{"eos_token_id": [256, 3], "suppress_tokens": [1], "custom": {"x": 1e-3}}\n'
    source = tiny_checkpoint(name="with_config")
    (source / "generation_config.json").write_text(text)
    convert(source, tmp_path / "pit2", check=False)
    for layout in ("untied", "shared"):
        fold(tmp_path / "pit2", tmp_path / layout, layout=layout)
        assert (tmp_path / layout / "generation_config.json").read_text() == text


def test_reading_backbone_tensors(pit: Write) -> None:
    model: FoldedModel = fold_checkpoint(open_checkpoint(pit("qwen2", tied=True)), "untied")
    names = model.tensor_names()
    assert names == sorted(names) and not [
        n for n in names if n.startswith("pit.") or "embed" in n or "lm_head" in n
    ]
    assert model.read("model.norm.weight").dtype == np.float32
    assert model.vocab_size == 263 and model.config["tie_word_embeddings"] is False
    with pytest.raises(InputError, match="the tensor nothing is missing"):
        model.read("nothing")


def _change(directory: Path, **fields: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))


def test_a_config_whose_width_is_not_the_tables(pit: Write, tmp_path: Path) -> None:
    directory = pit()
    _change(directory, hidden_size=32)
    with pytest.raises(
        InputError, match=r"pit.memory has shape \[263, 24\], config.json asks for \[vocab_size, 32\]"
    ):
        fold(directory, tmp_path / "out")


def test_a_record_of_folds_that_is_no_list(pit: Write, tmp_path: Path) -> None:
    fold(pit(), tmp_path / "folded")
    record = json.loads((tmp_path / "folded" / "config.json").read_text())["pit_fold"]
    _change(tmp_path / "folded", pit_fold={**record, "folds": 7})
    with pytest.raises(InputError, match=r"pit_fold.folds is 7; it must be a list of names"):
        fold(tmp_path / "folded", tmp_path / "out")


@pytest.mark.parametrize("layout", ["untied", "shared"])
def test_a_backbone_that_is_not_finite_is_not_folded(pit: Write, tmp_path: Path, layout: str) -> None:
    directory = pit(dtype="bfloat16")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][1, 2] = torch.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"up_proj.weight holds 1 values .* first at \[1, 2\]"):
        fold(directory, tmp_path / "out", layout=layout)
    assert not (tmp_path / "out").exists()
