"""Text for calibration and for held-out evaluation, without a corpus.

The two English texts come from `pydoc_data.topics`, the part of the Python language reference that `help()`
shows and that every CPython carries (PSF license). Topics differ between Python versions and some repeat
others word for word, so the selection is by rule:

1. A paragraph belongs to the shortest topic that holds it. What a longer topic repeats is dropped there.
2. Paragraphs that are code, grammar, tables or headings are dropped: what stays starts at the margin, has at
   least 80 characters, and ends like a sentence.
3. Topics with more than 2,000 characters left are sorted by name and dealt out in turn: the first to
   calibration, the second to evaluation, and so on. Each gives whole paragraphs up to 4,000 characters.

The texts are therefore disjoint, the same on each run of one Python, and slightly different between Python
versions. An artifact that must not depend on the Python version is calibrated with a file of its own.

Calibration sees other text besides, since what is calibrated on prose alone is worse at everything else:
sentences in some twenty languages, and code of CPython's own library.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pit_deploy.errors import InputError

MIN_TOPIC_CHARACTERS = 2000
MAX_TOPIC_CHARACTERS = 4000
MIN_PARAGRAPH_CHARACTERS = 80

CODE_MODULES = ("heapq", "textwrap", "json.encoder")
CODE_CHARACTERS = 2000  # of each

_PARAGRAPHS = re.compile(r"\n[ \t]*\n")


def calibration_text() -> str:
    """The default calibration text, paragraphs separated by blank lines.

    Raises `InputError` on a Python without `pydoc_data`, or with too little text in it.
    """
    return _texts()[0]


def other_text() -> str:
    """What calibration sees besides English prose: sentences in other languages and Python code, in turn.

    Modules without source files here are left out.
    """
    languages = (
        Path(__file__).with_name("languages.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    )
    parts = [_code(name) for name in CODE_MODULES]
    share = -(-len(languages) // len(parts))
    return "\n".join(
        "".join(languages[n * share : (n + 1) * share]) + "\n" + code for n, code in enumerate(parts)
    )


def evaluation_text() -> str:
    """English text for held-out evaluation; shares no paragraph and no topic with `calibration_text`.

    Raises `InputError` as `calibration_text` does.
    """
    return _texts()[1]


def read_calibration(path: Path | str | None) -> str:
    """The text of a UTF-8 file, or the default calibration text where `path` is None.

    Line ends become `\\n` and a byte order mark is dropped. Raises `InputError` where the file is missing, is
    not UTF-8, or holds no text.
    """
    if path is None:
        return calibration_text()
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"The calibration file {path} is not UTF-8 (byte {error.start}: {error.reason}); give plain text."
        ) from error
    except OSError as error:
        raise InputError(f"The calibration file {path} cannot be read: {error.strerror or error}.") from error
    if not text.strip():
        raise InputError(f"The calibration file {path} is empty; give some pages of text, or leave it out.")
    return text


def select_texts(topics: dict[str, str]) -> tuple[str, str]:
    """Deal `topics` (name to text) out into a calibration and an evaluation text, by the rule of this module.

    Raises `InputError` where fewer than two topics are long enough.
    """
    owned: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        owned[name] = []
        for paragraph, prose in paragraphs(topics[name]):
            if prose and paragraph not in seen:
                owned[name].append(paragraph)
            seen.add(paragraph)
    chosen = [name for name in sorted(owned) if sum(map(len, owned[name])) > MIN_TOPIC_CHARACTERS]
    if len(chosen) < 2:
        raise InputError(
            f"Python's own help topics hold only {len(chosen)} long ones here and two are needed; give a "
            f"calibration file."
        )
    calibration, evaluation = (
        "\n\n".join(paragraph for name in names for paragraph in _beginning(owned[name]))
        for names in (chosen[0::2], chosen[1::2])
    )
    return calibration + "\n", evaluation + "\n"


def _code(module: str) -> str:
    """The middle of a module's source, whole lines; empty where only compiled files are there."""
    file = importlib.import_module(module).__file__
    if file is None or not file.endswith(".py") or not Path(file).is_file():
        return ""
    lines = Path(file).read_text(encoding="utf-8").splitlines(keepends=True)
    kept: list[str] = []
    for line in lines[len(lines) // 3 :]:
        if sum(map(len, kept)) + len(line) > CODE_CHARACTERS:
            break
        kept.append(line)
    return "".join(kept)


def paragraphs(text: str) -> Iterator[tuple[str, bool]]:
    """The paragraphs of a help topic, each on one line, and whether it is prose (rule 2)."""
    for raw in _PARAGRAPHS.split(text.strip("\n")):
        paragraph = " ".join(raw.split())
        yield paragraph, _is_prose(raw, paragraph)


def _is_prose(raw: str, paragraph: str) -> bool:
    return (
        len(paragraph) >= MIN_PARAGRAPH_CHARACTERS
        and raw[0].isalpha()
        and paragraph[-1] in ".:!?"
        and "::=" not in paragraph
        and "|" not in paragraph
    )


def _beginning(paragraphs: list[str]) -> list[str]:
    """The first paragraphs, as many whole ones as fit into `MAX_TOPIC_CHARACTERS` (at least one)."""
    size, count = 0, 0
    for paragraph in paragraphs:
        size += len(paragraph)
        if count and size > MAX_TOPIC_CHARACTERS:
            break
        count += 1
    return paragraphs[:count]


def help_topics() -> dict[str, str]:
    """Python's help topics by name. Raises `InputError` on a Python without `pydoc_data`."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # some distributions split the standard library
        raise InputError(
            "This Python lacks pydoc_data, the source of the default texts; give a calibration file."
        ) from error
    return topics


@cache
def _texts() -> tuple[str, str]:
    return select_texts(help_topics())
