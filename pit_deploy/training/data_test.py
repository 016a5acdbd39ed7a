import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from pit_deploy.conftest import write_tokenizer
from pit_deploy.errors import InputError
from pit_deploy.quantize.calibration import calibration_text, evaluation_text
from pit_deploy.training.data import Blocks, english_text, pack, read_tokens, split_held_out


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path)
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def test_documents_are_joined_by_the_end_id(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("\ufeffab\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n\n{"text": "é", "other": 1}\n', encoding="utf-8")
    tokens = read_tokens([tmp_path / "a.txt", tmp_path / "b.jsonl"], tokenizer, 256)
    parts = [tokenizer.encode(t).ids for t in ("ab\n", "x", "é")]
    assert tokens.tolist() == [*parts[0], 256, *parts[1], 256, *parts[2], 256]
    assert 256 not in read_tokens([tmp_path / "a.txt"], tokenizer, None)


def test_blocks_are_cut_without_padding():
    assert pack(np.arange(11), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    item = Blocks(pack(np.arange(8, dtype=np.int32), 4))[1]
    assert torch.equal(item["input_ids"], torch.tensor([4, 5, 6, 7])) and item["labels"].dtype == torch.int64


def test_the_end_of_the_text_is_held_out():
    train, held = split_held_out(np.arange(40).reshape(20, 2), 0.1)
    assert held.tolist() == [[36, 37], [38, 39]] and len(train) == 18
    assert len(split_held_out(np.zeros((3, 2)), 0.01)[1]) == 1
    assert len(split_held_out(np.zeros((3, 2)), 0)[1]) == 0
    with pytest.raises(InputError, match="makes 1 blocks of 2 tokens"):
        split_held_out(np.zeros((1, 2)), 0.1)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.txt", b"", "holds no text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not valid JSON"),
        ("a.jsonl", b'{"content": "a"}\n', 'line 1 has no string under "text"'),
        ("a.jsonl", b'["a"]\n', "line 1 has no string"),
    ],
)
def test_faults_name_file_and_line(tmp_path, tokenizer, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_tokens([tmp_path / name], tokenizer, 256)


def test_a_missing_file_is_refused(tmp_path, tokenizer):
    with pytest.raises(InputError, match="is no file; give a text file"):
        read_tokens([tmp_path / "none.txt"], tokenizer, 256)


def test_a_data_set_of_the_datasets_library(tmp_path, tokenizer):
    pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("ab", "c")))
    (folder / "test.jsonl").write_text(json.dumps({"text": "d"}) + "\n")
    tokens = read_tokens([f"datasets:{folder}", f"datasets:{folder}:test"], tokenizer, 256)
    parts = [tokenizer.encode(t).ids for t in ("ab", "c", "d")]
    assert tokens.tolist() == [*parts[0], 256, *parts[1], 256, *parts[2], 256]
    with pytest.raises(InputError, match="cannot be loaded"):
        read_tokens([f"datasets:{tmp_path / 'nowhere'}"], tokenizer, 256)


def test_the_english_text_shares_nothing_with_what_is_measured_on():
    paragraphs = english_text().strip().split("\n\n")
    assert len(paragraphs) > 300 and len(set(paragraphs)) == len(paragraphs)
    for other in (calibration_text(), evaluation_text()):
        assert not set(paragraphs) & set(other.strip().split("\n\n"))
