from __future__ import annotations

import pytest

from pit_deploy.errors import InputError
from pit_deploy.generation_config import bos_id, end_ids, token_text

VOCABULARY = {"<s>": 1, "</s>": 2, "<end>": 106}


def test_end_ids_are_the_ordered_union() -> None:
    # mlx-vlm PR 309, executorch PR 15231: the config knows two, the tokenizer one of them.
    ids = end_ids({"eos_token_id": [1, 106]}, {"eos_token_id": 2}, {"eos_token": "<s>"}, VOCABULARY.get)
    assert ids == [1, 106, 2]
    assert end_ids(None, {"eos_token_id": 106}, {"eos_token": {"content": "</s>"}}, VOCABULARY.get) == [
        106,
        2,
    ]
    assert end_ids({"eos_token_id": 0}, {"eos_token_id": None}, {}, VOCABULARY.get) == [0]
    assert end_ids({}, {}, {"eos_token": "</s>"}, VOCABULARY.get) == [2]


def test_no_end_id_is_an_error_and_never_invented() -> None:
    with pytest.raises(InputError) as caught:
        end_ids({"eos_token_id": None}, {}, {"eos_token": None}, VOCABULARY.get)
    message = str(caught.value)
    for place in ("generation_config.json", "config.json", "tokenizer_config.json", '"eos_token_id": ID'):
        assert place in message
    with pytest.raises(InputError, match="'<gone>' is not in the vocabulary"):
        end_ids(None, {}, {"eos_token": "<gone>"}, VOCABULARY.get)


@pytest.mark.parametrize("value", [-1, "2", [1, None], True, 2.0, {"a": 1}])
def test_a_value_that_is_no_id_names_its_place(value: object) -> None:
    with pytest.raises(InputError, match=r"eos_token_id in config\.json must be a token id"):
        end_ids({"eos_token_id": 1}, {"eos_token_id": value}, {}, VOCABULARY.get)


def test_bos_id() -> None:
    assert bos_id({"bos_token_id": 5}, {"bos_token_id": 6}, {"bos_token": "<s>"}, VOCABULARY.get) == 5
    assert bos_id({"bos_token_id": None}, {"bos_token_id": 0}, {}, VOCABULARY.get) == 0
    assert bos_id(None, {}, {"bos_token": {"content": "<s>"}}, VOCABULARY.get) == 1
    assert bos_id(None, {}, {"bos_token": "<gone>"}, VOCABULARY.get) is None
    assert bos_id(None, {}, {}, VOCABULARY.get) is None
    with pytest.raises(InputError, match=r"bos_token_id in config\.json must be one token id"):
        bos_id(None, {"bos_token_id": [1, 2]}, {}, VOCABULARY.get)


def test_token_text() -> None:
    assert token_text("a") == token_text({"content": "a", "lstrip": False}) == "a"
    assert token_text(None) is token_text({"content": None}) is token_text(3) is None
