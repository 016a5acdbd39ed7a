from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pit_deploy.architecture import DecoderConfig
from pit_deploy.checkpoint import check_backbone_tensors, open_checkpoint, outlier_rows
from pit_deploy.errors import InputError
from pit_deploy.json_files import read_json
from pit_deploy.weight_files import cast, write_safetensors

Write = Callable[..., Path]


def _change_config(directory: Path, **fields: Any) -> None:
    config = {**json.loads((directory / "config.json").read_text()), **fields}
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def _change_tensors(directory: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors, None to remove one; `__` in a name stands for a dot."""
    file = directory / "model.safetensors"
    stored = load_file(file)
    for name, value in tensors.items():
        name = name.replace("__", ".")
        if value is None:
            del stored[name]
        else:
            stored[name] = value
    save_file(stored, file, metadata={"format": "pt"})


def _shard(directory: Path, shard_bytes: int) -> None:
    stored = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    write_safetensors(directory, stored.items(), shard_bytes)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [None, 5000])
def test_reads_every_dtype_in_one_file_or_shards(
    tiny_checkpoint: Write, dtype: str, tied: bool, shard_bytes: int | None
) -> None:
    directory = tiny_checkpoint(dtype=dtype, tied=tied)
    expected = load_file(directory / "model.safetensors")
    if shard_bytes:
        _shard(directory, shard_bytes)
        assert len(list(directory.glob("*.safetensors"))) > 3
    checkpoint = open_checkpoint(directory)
    checkpoint.check_tables()
    assert set(checkpoint.tensors) == set(expected)
    assert (checkpoint.kind, checkpoint.tied, checkpoint.table_rows) == ("plain", tied, 263)
    assert checkpoint.head_key == ("model.embed_tokens.weight" if tied else "lm_head.weight")
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read_torch(name), tensor)
        for numpy_dtype in (np.float32, np.float64):  # NumPy has no bf16; both hold all of it
            found = checkpoint.read(name, numpy_dtype)
            assert found.dtype == numpy_dtype
            assert np.array_equal(found, tensor.double().numpy())


def test_shards_that_are_written(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    shared = torch.ones(10)
    total = write_safetensors(
        tmp_path, [*tensors.items(), ("a", shared), ("b", shared), ("v", shared[2:5])], 100
    )
    assert total == 7 * 40 + 12
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)
    ]
    for name, file in index["weight_map"].items():
        assert torch.equal(
            load_file(tmp_path / file)[name], {**tensors, "a": shared, "b": shared, "v": shared[2:5]}[name]
        )


def test_a_tied_checkpoint_with_a_head_of_its_own(tiny_checkpoint: Write) -> None:
    directory = tiny_checkpoint()
    table = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    _change_tensors(directory, lm_head__weight=table.clone())
    checkpoint = open_checkpoint(directory)
    checkpoint.check_tables()
    assert checkpoint.notes == ["lm_head.weight repeats the tied embedding and is ignored"]
    other = table.clone()
    other[17, 3] += 0.25
    _change_tensors(directory, lm_head__weight=other)
    with pytest.raises(
        InputError, match=r"tie_word_embeddings true, but lm_head.weight differs .* by up to 0.25"
    ):
        open_checkpoint(directory).check_tables()
    _change_tensors(directory, lm_head__weight=table[:-1].clone())
    with pytest.raises(
        InputError, match=r"lm_head.weight \[262, 24\] and model.embed_tokens.weight \[263, 24\]"
    ):
        open_checkpoint(directory).check_tables()
    other[17, 3] = torch.nan
    _change_tensors(directory, lm_head__weight=other)
    with pytest.raises(InputError, match="by up to nan"):
        open_checkpoint(directory).check_tables()


@pytest.mark.parametrize("shard_bytes", [None, 5000])
def test_an_untied_checkpoint_without_a_head(tiny_checkpoint: Write, shard_bytes: int | None) -> None:
    directory = tiny_checkpoint()
    _change_config(directory, tie_word_embeddings=False)
    if shard_bytes:
        _shard(directory, shard_bytes)
    with pytest.raises(InputError, match=r"false, but lm_head.weight is in none of model.*\.safetensors"):
        open_checkpoint(directory).check_tables()


def test_untied_tables_of_different_shapes(tiny_checkpoint: Write) -> None:
    directory = tiny_checkpoint(tied=False)
    _change_tensors(directory, lm_head__weight=torch.ones(261, 24))
    with pytest.raises(InputError, match=r"has shape \[263, 24\] and lm_head.weight \[261, 24\]"):
        open_checkpoint(directory).check_tables()
    _change_tensors(directory, model__embed_tokens__weight=torch.ones(263, 23))
    with pytest.raises(InputError, match=r"shape \[263, 23\], config.json asks for \[vocab_size, 24\]"):
        open_checkpoint(directory).check_tables()
    _change_tensors(directory, model__embed_tokens__weight=None)
    with pytest.raises(InputError, match="no token table is there; looked for"):
        open_checkpoint(directory).check_tables()


def test_tying_is_the_familys_where_the_config_is_silent(tiny_checkpoint: Write) -> None:
    for family, tied in (("llama", False), ("gemma2", True), ("gpt2", True)):
        directory = tiny_checkpoint(family, name=family, tied=tied)
        _change_config(directory, tie_word_embeddings=...)
        assert open_checkpoint(directory).tied is tied


@pytest.mark.parametrize(
    ("rows", "said", "note"),
    [
        (
            263,
            263,
            r"6 rows of the table have no token and are masked \(vocab_size 263, table rows 263, tokenizer length 257",
        ),
        (
            263,
            270,
            r"disagree \(vocab_size 270, table rows 263, tokenizer length 257\); the table's rows are used",
        ),
        (257, 260, r"disagree \(vocab_size 260, table rows 257, tokenizer length 257\)"),
        (263, None, r"disagree \(vocab_size None, table rows 263"),
        (257, 257, None),
    ],
)
def test_the_tables_rows_are_the_truth(
    tiny_checkpoint: Write, rows: int, said: int | None, note: str | None
) -> None:
    directory = tiny_checkpoint(vocab_size=rows)
    _change_config(directory, vocab_size=said)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.check_vocabulary() == 257
    if note is None:
        assert checkpoint.notes == []
    else:
        (found,) = checkpoint.notes
        assert re.search(note, found)


def test_a_token_without_a_row_is_refused(tiny_checkpoint: Write) -> None:
    directory = tiny_checkpoint(vocab_size=250)
    with pytest.raises(
        InputError, match=r"knows 257 ids .*\(vocab_size 250, table rows 250, tokenizer length 257\)"
    ):
        open_checkpoint(directory).check_vocabulary()


def test_outlier_rows(rng: np.random.Generator) -> None:
    table = rng.standard_normal((3000, 24)).astype(np.float32)
    assert outlier_rows(table).size == 0
    table[-5:] = 0.02 * rng.standard_normal((5, 24))
    table[7] = 0
    table[8] *= 300
    assert outlier_rows(table, chunk=999).tolist() == [7, 8, *range(2995, 3000)]
    assert outlier_rows(np.ones((9, 2), np.float32)).size == 0


def _bytes(**parts: Any) -> bytes:
    header = json.dumps(parts.get("header", {})).encode()
    return struct.pack("<Q", parts.get("length", len(header))) + header + parts.get("data", b"")


_F32 = {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4_000_000]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04garbage",
        _bytes(header={"a": _F32}, data=b"\0" * 8),
        _bytes(header={"a": _F32}, length=2**40),
        _bytes(header={"a": {**_F32, "data_offsets": [0, 8]}}, data=b"\0" * 8),
        _bytes(header={"a": {**_F32, "data_offsets": [-8, 8]}}, data=b"\0" * 8),
        _bytes(header=[1, 2]),
    ],
)
def test_damaged_safetensors(tiny_checkpoint: Write, content: bytes) -> None:
    directory = tiny_checkpoint()
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(
        InputError, match=rf"model.safetensors cannot be read as safetensors \({len(content)} bytes\)"
    ):
        open_checkpoint(directory)


def test_a_file_cut_by_one_byte_or_gone(tiny_checkpoint: Write) -> None:
    directory = tiny_checkpoint()
    file = directory / "model.safetensors"
    checkpoint = open_checkpoint(directory)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(InputError, match="damaged or was not downloaded whole"):
        open_checkpoint(directory)
    with pytest.raises(InputError, match=r"model.norm.weight cannot be read"):
        checkpoint.read_torch("model.norm.weight")
    file.unlink()
    with pytest.raises(InputError, match=r"model.norm.weight cannot be read"):
        checkpoint.read("model.norm.weight")
    with pytest.raises(InputError, match="the tensor nonsense is missing"):
        checkpoint.read("nonsense")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../../etc/passwd"}}, "'../../etc/passwd' is not a file of the same folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "is not a file of the same folder"),
        ({"weight_map": {"a": "sub/x.safetensors"}}, "is not a file of the same folder"),
        ({"weight_map": {"a": ".."}}, "not there: .."),
        (
            {"weight_map": {"a": "gone.safetensors"}},
            r"names 1 shard\(s\) that are not there: gone.safetensors",
        ),
        ({"weight_map": {"a": "shard.safetensors"}}, r"names tensors that no shard holds: a \(1\)"),
        ({"weight_map": {"a": 3}}, "weight_map is missing or not an object"),
        ({"weight_map": {}}, "without any tensor"),
        ({}, "weight_map is missing"),
        ([], "holds a JSON list"),
    ],
)
def test_bad_indexes(tiny_checkpoint: Write, index: Any, message: str) -> None:
    directory = tiny_checkpoint()
    (directory / "model.safetensors").rename(directory / "shard.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=message):
        open_checkpoint(directory)


def test_pickles_are_never_opened(tiny_checkpoint: Write) -> None:
    directory = tiny_checkpoint()
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pit-deploy-was-here'\ntR.")
    with pytest.raises(InputError, match=r"only as pickle \(pytorch_model.bin\).*python -c .*safetensors"):
        open_checkpoint(directory)
    assert not Path("/tmp/pit-deploy-was-here").exists()
    (directory / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match="has no weights"):
        open_checkpoint(directory)
    assert open_checkpoint(directory, weights=False).tensors == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not valid JSON: .* at line 1 column 2"),
        (b"\xff\xfe", r"not UTF-8 text \(byte 0\)"),
        (b"[1]", "holds a JSON list; an object is expected"),
        (b"null", "holds a JSON NoneType"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON: Exceeds the limit"),
        (b"[" * 200_000, "nested too deeply|not valid JSON"),
        (b"{}", "model_type is missing"),
        (b'{"model_type": 3}', "model_type is missing"),
        (
            b'{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}',
            r"quantised already \(awq\)",
        ),
        (b'{"model_type": "llama", "quantization_config": 4}', r"quantised already \(method not named\)"),
        (
            b'{"model_type": "pit", "pit": {"version": 9}}',
            "pit.version is 9 and this pit-deploy reads up to 1; update",
        ),
        (b'{"model_type": "pit", "pit": true}', "field pit must be an object"),
        (b'{"model_type": "pit", "pit": {"version": true}}', "pit must be an object with a version number"),
        (b'{"model_type": "pit", "pit": {"version": -3}}', "pit.version is -3; versions start at 1"),
        (b'{"model_type": "x", "pit": {"version": 1}, "pit_fold": {"version": 1}}', "exclude each other"),
        (
            b'{"model_type": "pit", "pit": {"version": 1, "memory": "frozen", "bridge": "none"}}',
            "pit.backbone_model_type is None",
        ),
        (
            b'{"model_type": "x", "pit_fold": {"version": 1, "layout": "untied", "folds": 7}}',
            "pit_fold.folds is 7; it must be a list of names",
        ),
        (
            b'{"model_type": "llama", "num_hidden_layers": 3}',
            "num_hidden_layers 3, and the weights have 2 layers",
        ),
        (
            b'{"model_type": "x", "pit_fold": {"version": 1, "layout": "round"}}',
            "layout is 'round'; it must be untied or shared",
        ),
    ],
)
def test_bad_configs(tiny_checkpoint: Write, text: bytes, message: str) -> None:
    directory = tiny_checkpoint()
    (directory / "config.json").write_bytes(text)
    with pytest.raises(InputError, match=message):
        open_checkpoint(directory)


def test_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config.json is missing \(found an empty folder\)"):
        open_checkpoint(tmp_path)
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(InputError, match=r"found holiday.jpg"):
        open_checkpoint(tmp_path)
    with pytest.raises(InputError, match=r"is a file; a checkpoint is a directory"):
        open_checkpoint(tmp_path / "holiday.jpg")
    for missing in (tmp_path / "nowhere", "./no/where", "/a/b", "", "no where/x y"):
        if str(missing):
            with pytest.raises(InputError, match="does not exist; give a checkpoint directory"):
                open_checkpoint(missing)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match=r"config.json is a folder"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is not a GGUF file: it starts with b'' \(0 bytes\)"),
        (b"PK\x03\x04zip", r"is not a GGUF file: it starts with b'PK"),
        (b"GGUF" + b"\xff" * 60, r"cannot be read as GGUF: it is damaged \(64 bytes, .*fetch it again"),
        (b"GGUF\x03\0\0\0", r"cannot be read as GGUF: it is damaged \(8 bytes, "),
        (b"GGUF\x03\0\0\0" + b"garbage!" * 20, r"cannot be read as GGUF: it is damaged \(168 bytes, "),
    ],
)
def test_damaged_gguf(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        open_checkpoint(file)


def test_a_hub_id_without_a_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start = time.monotonic()
    with pytest.raises(
        InputError, match=r"^nobody/no-such-model is not a local path and could not be fetched"
    ) as raised:
        open_checkpoint("nobody/no-such-model")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 450
    assert time.monotonic() - start < 5


def test_a_hub_id_with_a_network(tiny_checkpoint: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny_checkpoint()
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    checkpoint = open_checkpoint("owner/a-model")
    assert (checkpoint.name, checkpoint.path) == ("owner/a-model", directory)
    assert not [pattern for pattern in asked["allow_patterns"] if "bin" in pattern or pattern.endswith(".py")]

    def fail(repo: str, **options: Any) -> str:
        raise ConnectionError("no\nroute " + "x" * 900)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(InputError, match=r"from the hub: no route x+\.\.\.$"):
        open_checkpoint("owner/a-model")


def test_code_of_the_checkpoint_is_never_run_nor_carried(tiny_checkpoint: Write) -> None:
    directory = tiny_checkpoint()
    _change_config(directory, auto_map={"AutoModelForCausalLM": "evil.Model"}, model_type="strange")
    checkpoint = open_checkpoint(directory)
    assert checkpoint.notes == ["the checkpoint asks for its own Python code (auto_map), which is never run"]
    assert "auto_map" not in checkpoint.backbone_config


def test_cast() -> None:
    assert cast("t", torch.ones(2), "float16").dtype == torch.float16
    assert cast("t", torch.ones(2), None).dtype == torch.float32
    assert cast("t", torch.ones(2, dtype=torch.int64), "float16").dtype == torch.int64
    with pytest.raises(InputError, match=r"t reaches 7e\+04, which is not a finite float16"):
        cast("t", torch.tensor([-7e4, 1.0]), "float16")


def test_a_bundle_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("config.json", "golden.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "manifest.json").write_text('{"format": "pit-deploy bundle"}')
    with pytest.raises(InputError, match="is a bundle, which pit-deploy export wrote, and no checkpoint"):
        open_checkpoint(tmp_path)
    for other in ("{", '{"format": "web app"}'):
        (tmp_path / "manifest.json").write_text(other)
        with pytest.raises(InputError, match="model_type is missing"):
            open_checkpoint(tmp_path)


def test_messages_name_what_the_user_gave(tiny_checkpoint: Write) -> None:
    directory = tiny_checkpoint()
    assert open_checkpoint(directory).label == str(directory)
    with pytest.raises(InputError, match=r"^model\.gguf: the tensor nonsense is missing"):
        open_checkpoint(directory, label="model.gguf").read_torch("nonsense")


def test_headers_against_the_config(tiny_checkpoint: Write) -> None:
    directory = tiny_checkpoint()

    def check() -> None:
        checkpoint = open_checkpoint(directory)
        check_backbone_tensors(checkpoint, DecoderConfig.from_hf(checkpoint.backbone_config))

    check()
    for fields, message in (
        ({"intermediate_size": 41}, r"6 of another shape .*\[24, 40\] instead of \[24, 41\]"),
        ({"num_hidden_layers": 1, "intermediate_size": 40}, "9 not part of this architecture"),
        (
            {"num_hidden_layers": 2, "hidden_size": 32},
            r"\[263, 24\], config.json asks for \[vocab_size, 32\]",
        ),
    ):
        _change_config(directory, **fields)
        with pytest.raises(InputError, match=message):
            check()
