"""Write tokens.json and the small tokenizers of tokenizers/: `python runtime_tests/vectors/make_tokens.py`.

The ids are those of Hugging Face's tokenizers. The small tokenizers are trained here, one for each kind of
tokenizer.json that the supported families use. With `--tokenizer FILE... --count N --out FILE` it writes the same
form for other tokenizers and more texts, which is what tests on the sample read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from pit_deploy.bundle import load_tokenizer
from pit_deploy.chat import (
    chat_template,
    has_chat_template,
    render_directory,
    special_tokens,
    tokenizer_config,
)
from pit_deploy.generate import TextStream

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from make_templates import CHATS  # noqa: E402 -- neighbours, not a package
from texts import surrogates, texts  # noqa: E402

COUNT = 400
_VOCABULARY = 420
_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASES = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizers() -> dict[str, Tokenizer]:
    """The small tokenizers by name."""
    corpus = texts(1500, seed=80)
    made = {
        "byte_level": _byte_level(corpus, pre_tokenizers.ByteLevel(add_prefix_space=False)),
        "digits": _byte_level(
            corpus,
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
        ),
        "split": _byte_level(corpus, _split(_LLAMA), ignore_merges=True),
        "split_nfc": _byte_level(corpus, _split(_LLAMA.replace("{1,3}", "")), normalizer=normalizers.NFC()),
        "split_cases": _byte_level(corpus, _split(_CASES)),
        "prefix_space": _byte_level(corpus, pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "sentencepiece": _sentencepiece(corpus, metaspace=False),
        "metaspace": _sentencepiece(corpus, metaspace=True),
    }
    bos = made["split"].token_to_id("<|start|>")
    made["split"].post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", bos)]),
        ]
    )
    return made


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _byte_level(
    corpus: Sequence[str],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    *,
    normalizer: normalizers.Normalizer | None = None,
    ignore_merges: bool = False,
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|start|>"])
    tokenizer.add_tokens(
        [AddedToken("<tool>", normalized=False, lstrip=True, rstrip=True), AddedToken("émoji")]
    )
    tokenizer.add_tokens([AddedToken("word", single_word=True)])
    return tokenizer


def _sentencepiece(corpus: Sequence[str], *, metaspace: bool) -> Tokenizer:
    """The kind that comes from SentencePiece: spaces as U+2581, unknown characters as bytes."""
    space = "\u2581"
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="first")
    letters = sorted(
        {c for text in corpus for c in text if c.isascii() and c.isprintable()} - {" "} | {space}
    )
    trainer = trainers.BpeTrainer(
        vocab_size=200, initial_alphabet=letters, limit_alphabet=len(letters), show_progress=False
    )
    trained.train_from_iterator([text for text in corpus if text.isascii()], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += sorted(model["vocab"], key=model["vocab"].__getitem__)
    # Runs of spaces have tokens of their own there.
    merges = [tuple(merge) for merge in model["merges"]] + [(space, space), (space * 2, space * 2)]
    vocabulary = {token: id for id, token in enumerate(dict.fromkeys([*tokens, space * 2, space * 4]))}
    merges = [m for m in dict.fromkeys(merges) if "".join(m) in vocabulary]
    bpe = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(bpe)
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=space, prepend_scheme="first", split=False
        )
    else:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(space), normalizers.Replace(" ", space)]
        )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def vectors(tokenizer: Tokenizer, name: str, file: str, found: Sequence[str]) -> dict[str, Any]:
    """One entry of `tokenizers`."""
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in found]
    decoded = [tokenizer.decode(i, skip_special_tokens=True) for i in ids]
    prompts = [text for text in found if 0 < len(text) < 40][:20]
    return {
        "name": name,
        "file": file,
        "ids": ids,
        "decoded": [None if d == text else d for d, text in zip(decoded, found, strict=True)],
        "prompts": [{"text": text, "ids": tokenizer.encode(text).ids} for text in prompts],
        "streams": [_stream(tokenizer, i) for i in _odd_sequences(tokenizer)],
    }


def _odd_sequences(tokenizer: Tokenizer) -> list[list[int]]:
    """Ids in an order that no text has: cut characters, runs of byte tokens, special tokens between."""
    import random

    rng, size = random.Random(10), tokenizer.get_vocab_size()
    return [[rng.randrange(size) for _ in range(rng.randint(1, 24))] for _ in range(40)]


def _stream(tokenizer: Tokenizer, ids: list[int]) -> dict[str, Any]:
    stream = TextStream(tokenizer)
    pieces = [*(stream.push(id) for id in ids), stream.finish()]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if "".join(pieces) != text:
        raise AssertionError(f"the stream of {ids} gave {pieces}, and the whole is {text!r}")
    return {"ids": ids, "pieces": pieces}


def document(
    sources: Sequence[tuple[str, str, Tokenizer]], count: int, special: Sequence[str]
) -> dict[str, Any]:
    """tokens.json for tokenizers of (name, file, tokenizer)."""
    found = texts(count, special=special)
    halves = surrogates(60)
    return {
        "format": 1,
        "texts": found,
        "surrogates": [{"units": units, "text": text} for units, text in halves],
        "tokenizers": [
            vectors(t, name, file, found)
            | {"surrogate_ids": [t.encode(text, add_special_tokens=False).ids for _, text in halves]}
            for name, file, t in sources
        ],
    }


def documents() -> dict[str, str]:
    """File name to text, as it lies in this folder."""
    made = {f"tokenizers/{name}.json": _compact(json.loads(t.to_str())) for name, t in tokenizers().items()}
    sources = [(Path(file).stem, file, Tokenizer.from_str(text)) for file, text in made.items()]
    special = ["<|end|>", "<|start|>", "<tool>", "émoji", "word", "</s>", "<unk>"]
    return {**made, "tokens.json": _lines(document(sources, COUNT, special))}


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _lines(value: dict[str, Any]) -> str:
    """Compact, with a line for each tokenizer and each further field."""
    text = _compact(value)
    return re.sub(r'(?<=[\]}]),(?="(?:surrogates|tokenizers)":)|(?<=\}),(?=\{"name":)', ",\n", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, nargs="*", default=[], help="tokenizer.json files")
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is None:
        (HERE / "tokenizers").mkdir(exist_ok=True)
        for name, text in documents().items():
            _write(HERE / name, text)
        return
    sources = []
    special: list[str] = []
    chats = []
    for file in given.tokenizer:
        tokenizer = load_tokenizer(file)
        name = file.stem if file.name != "tokenizer.json" else file.resolve().parent.name
        sources.append((name, str(file.resolve()), tokenizer))
        special += [t.content for t in tokenizer.get_added_tokens_decoder().values()][:8]
        if has_chat_template(file.parent):
            chats += _chats(file.parent, name, tokenizer)
    made = document(sources, given.count, list(dict.fromkeys(special))) | {"chats": chats}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    _write(given.out, _compact(made))


def _chats(directory: Path, name: str, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Chats in the model's own template, and their ids."""
    found = []
    for messages in CHATS.values():
        text = render_directory(directory, messages)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        found.append({"tokenizer": name, "messages": messages, "text": text, "ids": ids})
    return [
        {
            "template": chat_template(directory),
            "special_tokens": special_tokens(tokenizer_config(directory)),
            "cases": found,
        }
    ]


if __name__ == "__main__":
    main()
