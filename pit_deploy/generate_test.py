from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pit_deploy.errors import ContextFullError, InputError
from pit_deploy.generate import Generation, TextStream, generate, stream
from pit_deploy.runtimes.base import Runtime, check_room
from pit_deploy.sampling import SamplingOptions, sample

GREEDY = SamplingOptions()


class Counting:
    """A model that wants id + 1 (mod 20) next; `cache` is every id that ran, in order."""

    name, vocab_size = "counting", 20

    def __init__(self, context_length: int = 16) -> None:
        self.context_length = context_length
        self.cache: list[int] = []

    @property
    def position(self) -> int:
        return len(self.cache)

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        check_room(self, ids)
        self.cache += ids
        logits = np.zeros(self.vocab_size, dtype=np.float32)
        logits[(self.cache[-1] + 1) % 20] = 2.0
        return logits

    def decode(self, id: int) -> np.ndarray:
        return self.prefill([id])

    def reset(self) -> None:
        self.cache = []


def test_the_fake_is_a_runtime() -> None:
    assert isinstance(Counting(), Runtime)


def test_stops_on_any_stop_id_and_keeps_it_out() -> None:
    runtime, seen = Counting(), list[int]()
    got = generate(runtime, [3, 4], max_new_tokens=9, options=GREEDY, stop_ids=[8, 15], on_token=seen.append)
    assert got.ids == tuple(seen) == (5, 6, 7)
    assert (got.finish_reason, got.stop_id, got.prompt_tokens) == ("stop", 8, 2)
    assert runtime.cache == [3, 4, 5, 6, 7]  # nothing ran twice, the stop id not at all
    assert got.pending_ids == (8,)
    assert got.prefill_seconds > 0 and got.decode_seconds > 0
    assert got.tokens_per_second == pytest.approx(3 / got.decode_seconds)


def test_length() -> None:
    runtime = Counting()
    got = generate(runtime, [1], max_new_tokens=3, options=GREEDY, stop_ids=[])
    assert (got.ids, got.finish_reason, got.stop_id, got.pending_ids) == ((2, 3, 4), "length", None, (4,))
    assert runtime.cache == [1, 2, 3]


def test_no_new_tokens_runs_nothing() -> None:
    runtime = Counting()
    got = generate(runtime, [1, 2], max_new_tokens=0, options=GREEDY, stop_ids=[])
    assert got == Generation((), "length", None, 2, 0.0, 0.0)
    assert runtime.cache == [] and got.tokens_per_second == 0.0 and got.pending_ids == ()


def test_a_full_context_keeps_what_was_generated() -> None:
    got = generate(Counting(5), [1, 2, 3], max_new_tokens=9, options=GREEDY, stop_ids=[])
    assert (got.ids, got.finish_reason) == ((4, 5, 6), "context_full")
    got = generate(Counting(3), [1, 2, 3], max_new_tokens=9, options=GREEDY, stop_ids=[4])
    assert (got.ids, got.finish_reason) == ((), "stop")


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs() -> None:
    # executorch 6165, torchchat 1395: context 16, prompt of 20; and a second turn past the limit.
    runtime = Counting(16)
    for act in (generate, stream):
        with pytest.raises(ContextFullError) as caught:
            act(runtime, [1] * 20, max_new_tokens=4, options=GREEDY, stop_ids=[])
        assert (caught.value.used, caught.value.needed, caught.value.context_length) == (0, 20, 16)
    assert runtime.cache == []
    generate(runtime, [1] * 10, max_new_tokens=1, options=GREEDY, stop_ids=[])
    with pytest.raises(ContextFullError) as caught:
        generate(runtime, [1] * 7, max_new_tokens=4, options=GREEDY, stop_ids=[])
    assert caught.value.used == 10 and runtime.position == 10


def test_bad_arguments() -> None:
    with pytest.raises(InputError, match="no tokens"):
        generate(Counting(), [], max_new_tokens=1, options=GREEDY, stop_ids=[])
    with pytest.raises(InputError, match="Token id 20 is outside"):
        generate(Counting(), [20], max_new_tokens=1, options=GREEDY, stop_ids=[])
    with pytest.raises(InputError, match="max_new_tokens must be 0 or more, but is -1"):
        generate(Counting(), [1], max_new_tokens=-1, options=GREEDY, stop_ids=[])


def test_cancel_from_the_callback() -> None:
    got = generate(
        Counting(), [1], max_new_tokens=9, options=GREEDY, stop_ids=[], on_token=lambda id: id != 4
    )
    assert (got.ids, got.finish_reason, got.pending_ids) == ((2, 3, 4), "cancelled", (4,))


def test_stream_gives_each_id_as_it_is_drawn() -> None:
    runtime = Counting()
    tokens = stream(runtime, [1], max_new_tokens=9, options=GREEDY, stop_ids=[6])
    assert runtime.cache == []
    assert next(tokens) == 2
    assert runtime.cache == [1]
    with pytest.raises(RuntimeError, match="not ended"):
        _ = tokens.generation
    assert list(tokens) == [3, 4, 5]
    assert (tokens.generation.finish_reason, tokens.generation.stop_id) == ("stop", 6)
    assert list(tokens) == []
    tokens = stream(Counting(), [1], max_new_tokens=9, options=GREEDY, stop_ids=[])
    next(tokens)
    tokens.cancel()
    assert tokens.generation.finish_reason == "cancelled" and tokens.generation.ids == (2,)


def test_a_second_turn_appends_and_recomputes_nothing() -> None:
    runtime = Counting()
    first = generate(runtime, [3], max_new_tokens=9, options=GREEDY, stop_ids=[6])
    second = generate(runtime, [*first.pending_ids, 10], max_new_tokens=2, options=GREEDY, stop_ids=[6])
    assert second.ids == (11, 12)
    assert runtime.cache == [3, 4, 5, 6, 10, 11]


class Flat(Counting):
    """Every id is equally likely."""

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        super().prefill(ids)
        return np.zeros(self.vocab_size, dtype=np.float32)


def test_draws_follow_the_seed_and_the_position() -> None:
    options = SamplingOptions(temperature=1.0, seed=5)
    first = generate(Flat(), [1, 2, 3], max_new_tokens=6, options=options, stop_ids=[])
    want = tuple(sample(np.zeros(20), options, step) for step in range(3, 9))
    assert first.ids == want
    assert generate(Flat(), [1, 2, 3], max_new_tokens=6, options=options, stop_ids=[]).ids == want
    other = SamplingOptions(temperature=1.0, seed=6)
    assert generate(Flat(), [1, 2, 3], max_new_tokens=6, options=other, stop_ids=[]).ids != want


def test_the_penalty_sees_prompt_history_and_new_ids() -> None:
    options = SamplingOptions(repetition_penalty=4.0)
    # The wanted id's logit 2 falls to 0.5 where it was seen, and then a rival with 1 wins.

    class Rival(Counting):
        def prefill(self, ids: Sequence[int]) -> np.ndarray:
            logits = super().prefill(ids)
            logits[17] = 1.0
            return logits

    def first(prompt: list[int], history: Sequence[int] = ()) -> tuple[int, ...]:
        return generate(Rival(), prompt, max_new_tokens=1, options=options, stop_ids=[], history=history).ids

    assert first([4]) == (5,)
    assert first([5, 4]) == (17,)
    assert first([4], history=[5]) == (17,)
    # 5, 6 and 7 are new when they are wanted, so the rival never wins.
    assert generate(Rival(), [4], max_new_tokens=3, options=options, stop_ids=[]).ids == (5, 6, 7)


def byte_level() -> Tokenizer:
    """Every byte a token, two merges, one special and one plain added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: i for i, char in enumerate([*alphabet, "he", "llo"])}
    vocabulary["ll"] = len(vocabulary)
    merges = [("h", "e"), ("l", "l"), ("ll", "o")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>")])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2: unknown characters become tokens such as <0xE4>."""
    vocabulary = {f"<0x{i:02X}>": i for i in range(256)}
    vocabulary |= {token: 256 + i for i, token in enumerate(["▁", "▁a", "b", "▁▁"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def word_piece() -> Tokenizer:
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, ".": 3, "we": 4, "'": 5, "##s": 6}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    text = TextStream(tokenizer)
    return [*(text.push(id) for id in ids), text.finish()]


@pytest.mark.parametrize("text", ["hello 🙂 hello", "日本語👩‍👩‍👧ß", "a<|end|>b<tool>c", "naïve\n\n café"])
def test_text_comes_out_whole_characters_at_a_time(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text).ids
    got = pieces(tokenizer, ids)
    assert "".join(got) == tokenizer.decode(ids, skip_special_tokens=True) == text.replace("<|end|>", "")
    assert all("�" not in piece for piece in got)
    assert got[-1] == ""


def test_an_emoji_waits_for_its_last_byte() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("🙂!").ids
    assert len(ids) == 5
    assert pieces(tokenizer, ids) == ["", "", "", "🙂", "!", ""]
    assert pieces(tokenizer, ids[:3]) == ["", "", "", "�"]  # the text ends inside the character


def test_byte_fallback_runs_wait_for_their_end() -> None:
    tokenizer = byte_fallback()
    assert pieces(tokenizer, [257, 0xE4, 0xBD, 0xA0, 258]) == ["a", "", "", "", "你b", ""]
    # One bad byte later makes the decoder give up the whole run, so giving 你 early would be wrong.
    assert pieces(tokenizer, [257, 0xE4, 0xBD, 0xA0, 0xFF, 258])[4:] == ["", "����b", ""]
    assert pieces(tokenizer, [257, 0x0A]) == ["a", "", "\n"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_piece])
def test_random_ids_join_to_the_whole(make: Callable[[], Tokenizer]) -> None:
    tokenizer, rng = make(), np.random.default_rng(3)
    size = tokenizer.get_vocab_size()
    for _ in range(150):
        ids = rng.integers(0, size + 2, int(rng.integers(0, 60))).tolist()  # ids past the vocabulary too
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True), ids


def test_the_cost_is_linear() -> None:
    class Counted:
        def __init__(self, inner: Tokenizer) -> None:
            self.inner, self.decoded = inner, 0
            self.id_to_token = inner.id_to_token
            self.get_added_tokens_decoder = inner.get_added_tokens_decoder

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.decoded += len(ids)
            return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)

    for ids in ([70, 71, 72] * 700, [255] * 2100):  # letters, and bytes that never become a character
        counted = Counted(byte_level())
        assert "".join(pieces(counted, ids)) == counted.inner.decode(ids)  # type: ignore[arg-type]
        assert counted.decoded < 20 * len(ids)


def test_finish_starts_anew() -> None:
    text = TextStream(byte_level())
    text.push(71)
    text.finish()
    assert text.push(71) == byte_level().decode([71]) and text.finish() == ""
