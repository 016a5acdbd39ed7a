"""End and start ids, gathered from the three files that may name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pit_deploy.errors import InputError
from pit_deploy.json_files import read_json_if_there

if TYPE_CHECKING:
    from pit_deploy.checkpoint import Checkpoint

TokenToId = Callable[[str], int | None]


def end_ids(
    generation_config: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    token_to_id: TokenToId,
) -> list[int]:
    """The ids that end a generation: generation_config's, then config's, then the tokenizer's, each once.

    Raises `InputError` where none is named or a value is not an id; an end id is never invented.
    """
    found = [
        *_ids((generation_config or {}).get("eos_token_id"), "eos_token_id in generation_config.json"),
        *_ids(config.get("eos_token_id"), "eos_token_id in config.json"),
    ]
    token = token_text(tokenizer_config.get("eos_token"))
    id = token_to_id(token) if token is not None else None
    if id is not None:
        found.append(id)
    if not found:
        named = "" if token is None else f" (its {token!r} is not in the vocabulary)"
        raise InputError(
            "No end-of-sequence id was found: eos_token_id in generation_config.json, eos_token_id in "
            f"config.json and eos_token in tokenizer_config.json were looked at{named}; add "
            '"eos_token_id": ID to generation_config.json.'
        )
    return list(dict.fromkeys(found))


def bos_id(
    generation_config: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    token_to_id: TokenToId,
) -> int | None:
    """The start id that the first of the same three places names, or None.

    Whether a prompt begins with it is the tokenizer's decision, not ours.
    """
    for source, name in ((generation_config or {}, "generation_config.json"), (config, "config.json")):
        ids = _ids(source.get("bos_token_id"), f"bos_token_id in {name}")
        if len(ids) > 1:
            raise InputError(f"bos_token_id in {name} must be one token id, but is {ids}.")
        if ids:
            return ids[0]
    token = token_text(tokenizer_config.get("bos_token"))
    return token_to_id(token) if token is not None else None


def token_text(value: Any) -> str | None:
    """The text of a special token, which tokenizer_config.json writes as a string or as {"content": ...}."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any, place: str) -> list[int]:
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or id < 0:
            raise InputError(f"{place} must be a token id or a list of token ids, but is {value!r}.")
    return ids


def checkpoint_end_ids(checkpoint: Checkpoint) -> list[int]:
    """`end_ids` of a checkpoint directory; raises `InputError` also for one that the tokenizer does not have."""
    found = end_ids(*_places(checkpoint))
    tokens = checkpoint.tokenizer_length()
    wrong = [id for id in found if id >= tokens]
    if wrong:
        raise InputError(
            f"{checkpoint.label}: the end id {wrong[0]} is not in the tokenizer ({tokens} ids); correct "
            f"eos_token_id in generation_config.json or config.json."
        )
    return found


def check_generation_config(checkpoint: Checkpoint) -> None:
    """Raise `InputError` where generation_config.json asks for sampling that is not possible."""
    from pit_deploy.sampling import SamplingOptions

    file = checkpoint.path / "generation_config.json"
    try:
        SamplingOptions.from_generation_config(read_json_if_there(file))
    except InputError as error:
        raise InputError(f"{file}: {error}") from error


def checkpoint_bos_id(checkpoint: Checkpoint) -> int | None:
    """`bos_id` of a checkpoint directory."""
    return bos_id(*_places(checkpoint))


def _places(checkpoint: Checkpoint) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], TokenToId]:
    """The three places that name ids, and the tokenizer's vocabulary."""
    from pit_deploy.bundle import load_tokenizer

    generation = read_json_if_there(checkpoint.path / "generation_config.json")
    tokenizer_config = read_json_if_there(checkpoint.path / "tokenizer_config.json")
    to_id = load_tokenizer(checkpoint.path / "tokenizer.json").token_to_id
    return generation, checkpoint.config, tokenizer_config, to_id
