"""Write pitcore's unicode.txt: the general categories as Hugging Face's tokenizers has them.

Phones and JVMs carry Unicode tables of different years, and a letter that one of them does not know would be split
otherwise. `python android_demo/tools/make_unicode.py` asks tokenizers itself, a minute long.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

_NAMES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Co"
CATEGORIES = _NAMES.split()
OUT = Path(__file__).resolve().parents[1] / "pitcore/src/main/resources/org/pitdeploy/core/unicode.txt"
_ALL = "".join(chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000)


def ranges(pattern: str) -> list[tuple[int, int]]:
    """First and last code point of each run that `pattern` matches."""
    pieces = Split(Regex(f"(?:{pattern})+"), "removed", invert=True).pre_tokenize_str(_ALL)
    return [(ord(text[0]), ord(text[-1])) for text, _ in pieces]


def line(name: str, found: list[tuple[int, int]]) -> str:
    return " ".join([name, *(f"{a:x}" if a == b else f"{a:x}-{b:x}" for a, b in found)])


def main() -> None:
    head = f"# General categories of tokenizers {tokenizers.__version__}; what is missing is Cn."
    lines = [f"{head} Written by tools/make_unicode.py."]
    lines += [line(name, ranges(rf"\p{{{name}}}")) for name in CATEGORIES]
    lines.append("# Characters of words besides L, M, Nd, Nl and Pc, and white space.")
    # Rust's regular expressions, which look for words beside added tokens, count the two joiners as well.
    words = ranges(r"[\w&&[^\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}]]")
    lines.append(line("word", [*words, (0x200C, 0x200D)]))
    lines.append(line("space", ranges(r"\s")))
    OUT.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
