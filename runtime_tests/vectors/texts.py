"""Texts that ports of tokenizers get wrong, made from a seed: all scripts, emoji, controls, code, odd spaces."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Sequence

# First and last code point of blocks; unassigned code points in them are wanted too.
_BLOCKS = {
    "latin": (0x20, 0x7E),
    "latin-1": (0xA0, 0xFF),
    "latin extended": (0x100, 0x24F),
    "greek": (0x370, 0x3FF),
    "cyrillic": (0x400, 0x52F),
    "armenian": (0x530, 0x58F),
    "hebrew": (0x590, 0x5FF),
    "arabic": (0x600, 0x6FF),
    "devanagari": (0x900, 0x97F),
    "bengali": (0x980, 0x9FF),
    "tamil": (0xB80, 0xBFF),
    "thai": (0xE00, 0xE7F),
    "tibetan": (0xF00, 0xFFF),
    "myanmar": (0x1000, 0x109F),
    "georgian": (0x10A0, 0x10FF),
    "hangul jamo": (0x1100, 0x11FF),
    "ethiopic": (0x1200, 0x137F),
    "cherokee": (0x13A0, 0x13FF),
    "khmer": (0x1780, 0x17FF),
    "mongolian": (0x1800, 0x18AF),
    "greek extended": (0x1F00, 0x1FFF),
    "punctuation": (0x2000, 0x206F),
    "symbols": (0x20A0, 0x2BFF),
    "glagolitic": (0x2C00, 0x2C5F),
    "kana": (0x3000, 0x30FF),
    "han": (0x4E00, 0x9FFF),
    "yi": (0xA000, 0xA4CF),
    "hangul": (0xAC00, 0xD7A3),
    "private use": (0xE000, 0xE0FF),
    "compatibility": (0xF900, 0xFAFF),
    "presentation forms": (0xFB00, 0xFDFF),
    "half width": (0xFF00, 0xFFEF),
    "specials": (0xFFF0, 0xFFFF),
    "old scripts": (0x10280, 0x1057F),
    "newest scripts": (0x10D40, 0x10EFF),
    "mathematical": (0x1D400, 0x1D7FF),
    "pictographs": (0x1F300, 0x1FAFF),
    "han, plane 2": (0x20000, 0x2A6DF),
    "tags": (0xE0000, 0xE007F),
}
_LANGUAGES = (
    "the quick model reads every token twice and forgets nothing it's we're I'll they'd don't SHE'S CAN'T "
    "état größe naïve señor søster język İstanbul ångström Привет мир данные γλώσσα שלום عربي हिन्दी "
    "ไทย 中文 日本語 한국어 tiếng Việt ქართული հայերեն አማርኛ 2026 3.14159 1,000,000 0xFF ½ ² Ⅻ ٣٤ ४५"
)
_WORDS = _LANGUAGES.split()
_SIGNS = "🙂 👋 👍🏽 👩‍👩‍👧‍👦 🇩🇪 🇯🇵 ❤️ ❤ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 1️⃣ 🫠 🧑🏿‍🚀 ☺︎"
_EMOJI = _SIGNS.split()
_SPACES = (
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r\n",
    "\n\n",
    "\u00a0",
    "\u2003",
    "\u3000",
    "\u0085",
    "\u200b",
    "\u2028",
)
_CODE = (
    "def f(x):\n    return x ** 2  # {}\n",
    "for (int i = 0; i < {}; ++i) {{\n\tsum += a[i];\n}}\n",
    '{{"key": [{}, null, true], "s": "a\\"b"}}',
    "<a href='https://example.org/{}?q=%20'>x</a>",
    "SELECT * FROM t WHERE id={} AND name LIKE '%a%';",
    "\\frac{{{}}}{{2}} \\neq $x_1^2$",
    "$ ls -la | grep '{}' >> out.txt 2>&1",
)


def texts(count: int, seed: int = 8, special: Sequence[str] = ()) -> list[str]:
    """`count` texts without halves of surrogate pairs; the strings of `special` stand inside some of them."""
    rng = random.Random(seed)
    makers: list[Callable[[random.Random], str]] = [
        _script,
        _sentence,
        _emoji,
        _controls,
        _spaces,
        _code,
        _digits,
        _marks,
        _any,
        _runs,
        _mixed,
    ]
    fixed = [
        "",
        " ",
        "\n",
        "a",
        "'s",
        "x'\u017f",
        "\u0000",
        "\ufeff",
        "\U0010ffff",
        "▁",
        "a▁b",
        "<0x0A>",
        "e\u0301",
    ]
    found = fixed[:count]
    while len(found) < count:
        text = makers[len(found) % len(makers)](rng)
        if special and rng.random() < 0.15:
            place = rng.randrange(len(text) + 1)
            around = rng.choice(("", "", " ", "  ", "\n"))
            text = text[:place] + around + rng.choice(list(special)) + around + text[place:]
        found.append(text)
    return found


def surrogates(count: int, seed: int = 9) -> list[tuple[list[int], str]]:
    """UTF-16 code units with halves of pairs among them, and the text in which each such half is U+FFFD."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        units: list[int] = []
        for _ in range(rng.randrange(1, 12)):
            kind = rng.random()
            if kind < 0.4:
                units.append(rng.randrange(0x20, 0x7F))
            elif kind < 0.7:
                units.append(rng.randrange(0xD800, 0xE000))
            else:
                units += _units(chr(rng.randrange(0x1F600, 0x1F640)))
        data = b"".join(unit.to_bytes(2, "little") for unit in units)
        found.append((units, _replaced(data.decode("utf-16-le", "surrogatepass"))))
    return found


def _replaced(text: str) -> str:
    return "".join("\ufffd" if 0xD800 <= ord(c) < 0xE000 else c for c in text)


def _units(text: str) -> list[int]:
    data = text.encode("utf-16-le")
    return [int.from_bytes(data[i : i + 2], "little") for i in range(0, len(data), 2)]


def _character(rng: random.Random, first: int, last: int) -> str:
    return chr(rng.randint(first, last))


def _script(rng: random.Random) -> str:
    first, last = _BLOCKS[rng.choice(list(_BLOCKS))]
    words = [
        "".join(_character(rng, first, last) for _ in range(rng.randint(1, 7)))
        for _ in range(rng.randint(1, 4))
    ]
    return rng.choice((" ", " ", "", "-")).join(words)


def _sentence(rng: random.Random) -> str:
    words = [rng.choice(_WORDS) for _ in range(rng.randint(1, 9))]
    text = rng.choice((" ", " ", " ", "  ", ", ")).join(words)
    return rng.choice((text, text.upper(), text.capitalize())) + rng.choice((".", "!", "?", "...", "", " "))


def _emoji(rng: random.Random) -> str:
    return "".join(rng.choice(_EMOJI) + rng.choice(("", "", " ", "!", "a")) for _ in range(rng.randint(1, 5)))


def _controls(rng: random.Random) -> str:
    odd = [
        *range(0x20),
        *range(0x7F, 0xA0),
        0xAD,
        *range(0x200B, 0x2010),
        *range(0x202A, 0x202F),
        0xFEFF,
        0xFFFD,
    ]
    parts = [
        chr(rng.choice(odd)) if rng.random() < 0.6 else rng.choice(_WORDS) for _ in range(rng.randint(1, 8))
    ]
    return "".join(parts)


def _spaces(rng: random.Random) -> str:
    parts = [
        rng.choice(_SPACES) if rng.random() < 0.6 else rng.choice(_WORDS) for _ in range(rng.randint(1, 9))
    ]
    return "".join(parts)


def _code(rng: random.Random) -> str:
    return rng.choice(_CODE).format(rng.choice(_WORDS))


def _digits(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789., -+eE٣७½²x") for _ in range(rng.randint(1, 16)))


def _marks(rng: random.Random) -> str:
    text = "".join(
        rng.choice("aeiounAEO가") + "".join(chr(rng.randint(0x300, 0x36F)) for _ in range(rng.randint(0, 3)))
        for _ in range(rng.randint(1, 6))
    )
    return unicodedata.normalize(rng.choice(("NFC", "NFD")), text)


def _any(rng: random.Random) -> str:
    points = (rng.randrange(0x110000 - 0x800) for _ in range(rng.randint(1, 6)))
    return "".join(chr(p if p < 0xD800 else p + 0x800) for p in points)


def _runs(rng: random.Random) -> str:
    return "".join(rng.choice("a -_=!.\n\t0é中") * rng.randint(1, 20) for _ in range(rng.randint(1, 4)))


def _mixed(rng: random.Random) -> str:
    parts = (_sentence, _emoji, _code, _digits, _script, _spaces)
    return rng.choice((" ", "", "\n")).join(rng.choice(parts)(rng) for _ in range(rng.randint(2, 3)))
