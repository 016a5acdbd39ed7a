"""Tiny checkpoints for the parity matrix: random layers between tables that make the greedy text known beforehand.

Tokens stand on a circle in a fixed order, and the head answers each token with the next one: the tables are a
Fourier basis on the circle, so that "the next" is a rotation, which a PIT bridge can express. The layers are random
and push the logits about. After the prompt of the golden record come `STEPS` printable tokens and then an end id, so
that a client which stops elsewhere, or reads another token, gives another text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
STEPS = 40
HIDDEN, VOCABULARY = 64, 304
"""304 rows for fewer tokens: the rest can never be generated."""
END, START = "<|end|>", "<|start|>"
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_WORDS = ("the", "ing", "and", "ion", "ent", "in", "re", "er", "an", "on", "es", "or", "st", "ll", "qu", "ck")
_PEAK = 5.0
"""Logit of the next token, layers aside."""


def write_tiny(
    directory: Path, family: str = "llama", *, layers: int = 2, seed: int = 0, **fields: Any
) -> Path:
    """Write a plain checkpoint of `family` with its tokenizer to `directory`, which is made; return it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True)
    ids = write_tokenizer(directory)
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=320,
        tie_word_embeddings=False,
        bos_token_id=ids[START],
        eos_token_id=ids[END],
        pad_token_id=None,
    )
    if family == "mistral":
        sizes["sliding_window"] = None
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **fields}))
    embedding, head = tables(circle(ids, seed), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.normal_(
                    std=0.1 * (2 / layers) ** 0.5
                )  # what all layers add is the same for any number
            elif parameter.ndim == 2:
                parameter.normal_(std=0.1)
            elif not name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=0.1)
        model.get_input_embeddings().weight.copy_(torch.from_numpy(embedding))
        model.get_output_embeddings().weight.copy_(torch.from_numpy(head))
    model.save_pretrained(directory)
    generation = {"eos_token_id": [ids[END], ids["ÿ"]], "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    (directory / "LICENSE").write_text("MIT\n")
    return directory


def write_tokenizer(directory: Path) -> dict[str, int]:
    """A byte-level BPE tokenizer with some merges; returns ids by token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: id for id, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for left, right in _merges():
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (END, START)])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": END,
        "bos_token": START,
        "add_bos_token": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return dict(tokenizer.get_vocab(with_added_tokens=True))


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs that build `_WORDS` from letters, each once; every text of the record needs some of them."""
    made: set[str] = set()
    for word in _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in made:
                made.add(word[:end])
                yield word[: end - 1], word[end - 1]


def circle(ids: dict[str, int], seed: int) -> list[int]:
    """Every row of the table in the order of the circle: line feed, `STEPS` printable tokens, the end id, the rest."""
    rng = np.random.default_rng(seed)
    printable = sorted(id for token, id in ids.items() if token.isascii() and token.isalnum())
    walk = [ids["Ċ"], *rng.permutation(printable)[:STEPS].tolist(), ids[END]]
    rest = [id for id in range(VOCABULARY) if id not in set(walk)]
    return [*walk, *rng.permutation(rest).tolist()]


def tables(order: list[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Embedding and head, float32 [VOCABULARY, HIDDEN]: `head @ embedding[a]` is largest at the token after `a`."""
    rng = np.random.default_rng(seed)
    count, half = len(order), HIDDEN // 2
    frequencies = rng.choice(np.arange(1, count // 2), half, replace=False)

    def features(place: np.ndarray) -> np.ndarray:
        angle = 2 * np.pi * np.outer(place, frequencies) / count
        return np.concatenate([np.cos(angle), np.sin(angle)], axis=1)

    places = np.empty(count, int)
    places[order] = np.arange(count)
    mixing = np.linalg.qr(rng.standard_normal((HIDDEN, HIDDEN)))[0] * np.geomspace(2, 0.5, HIDDEN)
    embedding = features(places) @ mixing
    # The final norm makes the root mean square 1, whatever the row's own is: about that of these rows.
    scale = np.sqrt((embedding**2).mean())
    head = features(places - 1) @ np.linalg.inv(mixing).T * (_PEAK * scale / half)
    return embedding.astype(np.float32), head.astype(np.float32)
