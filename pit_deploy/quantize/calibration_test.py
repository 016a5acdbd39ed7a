import sys
from pathlib import Path

import pytest

from pit_deploy.errors import InputError
from pit_deploy.quantize import calibration, calibration_text, evaluation_text, read_calibration

SENTENCE = "This is sentence number {} of the topic {}, long enough to count as a paragraph of English prose."


def prose(name: str, count: int = 30) -> str:
    return "\n\n".join(SENTENCE.format(number, name).replace("number", "number\n") for number in range(count))


def paragraphs(text: str) -> list[str]:
    return text.strip().split("\n\n")


def test_default_texts_are_long_disjoint_and_the_same_each_time() -> None:
    first, second = calibration_text(), evaluation_text()
    assert len(first) > 15_000 and len(second) > 15_000  # four characters a token or a few more
    assert not set(paragraphs(first)) & set(paragraphs(second))
    assert len(set(paragraphs(first))) == len(paragraphs(first))
    from pydoc_data.topics import topics

    assert calibration.select_texts(topics) == (first, second)
    assert calibration.select_texts(dict(reversed(topics.items()))) == (first, second)


def test_default_texts_are_prose() -> None:
    for text in (calibration_text(), evaluation_text()):
        letters = sum(character.isalpha() or character.isspace() for character in text)
        assert letters / len(text) > 0.9
        assert "::=" not in text and ">>>" not in text


def test_topics_alternate_by_name_and_are_cut_at_whole_paragraphs() -> None:
    topics = {name: prose(name, 100) for name in "dbca"}
    first, second = calibration.select_texts(topics)
    assert "topic a," in first and "topic c," in first and "topic b," in second and "topic d," in second
    assert "topic b," not in first and "topic a," not in second
    assert len(first) < 2 * (calibration.MAX_TOPIC_CHARACTERS + 200)
    assert all(paragraph.endswith("prose.") for paragraph in paragraphs(first))


def test_what_a_longer_topic_repeats_belongs_to_the_shorter() -> None:
    topics = {"a": prose("x"), "b": prose("x") + "\n\n" + prose("y"), "c": prose("z")}
    first, second = calibration.select_texts(topics)
    assert "topic x," in first and "topic z," in first
    assert "topic x," not in second and "topic y," in second


def test_code_tables_and_headings_are_left_out() -> None:
    noise = "\n\n".join(
        [
            "A Heading Without an End That Goes on for More Than Eighty Characters in the Line It Is on",
            "   indented = 'code' # that is longer than eighty characters, so that length is no excuse.",
            "stmt ::= something with a grammar rule that is longer than eighty characters, like the rest.",
            "| a table | with cells | longer than eighty characters, so that length is no excuse. |.",
            "Short.",
        ]
    )
    first, second = calibration.select_texts({"a": noise + "\n\n" + prose("a"), "b": prose("b")})
    for part in ("Heading", "indented", "::=", "|", "Short"):
        assert part not in first + second


def test_too_few_long_topics_are_an_error() -> None:
    with pytest.raises(InputError, match="only 1 long ones"):
        calibration.select_texts({"a": prose("a"), "b": "Short."})
    with pytest.raises(InputError, match="only 0 long ones"):
        calibration.select_texts({})


def test_a_python_without_topics_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    calibration._texts.cache_clear()
    with pytest.raises(InputError, match="pydoc_data"):
        calibration_text()
    calibration._texts.cache_clear()


def test_reading_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffÀ la carte.\r\nSecond line.\n".encode())
    assert read_calibration(path) == "À la carte.\nSecond line.\n"
    assert read_calibration(str(path)) == "À la carte.\nSecond line.\n"
    assert read_calibration(None) == calibration_text()


def test_files_that_give_no_text_are_refused(tmp_path: Path) -> None:
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_text(" \n\n")
    latin.write_bytes("voil\u00e0".encode("latin-1"))
    with pytest.raises(InputError, match=r"empty\.txt is empty"):
        read_calibration(empty)
    with pytest.raises(InputError, match=r"latin\.txt is not UTF-8 \(byte 4"):
        read_calibration(latin)
    with pytest.raises(InputError, match=r"missing\.txt cannot be read"):
        read_calibration(tmp_path / "missing.txt")
    with pytest.raises(InputError, match="cannot be read"):
        read_calibration(tmp_path)
