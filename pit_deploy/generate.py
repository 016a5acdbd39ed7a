"""The generation loop over any runtime, and the text of a growing list of ids."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pit_deploy.errors import InputError
from pit_deploy.runtimes.base import Runtime, VerifyingRuntime, check_room
from pit_deploy.sampling import SamplingOptions, sample
from pit_deploy.speculation import Speculation, SpeculationCounts

FinishReason = Literal["stop", "length", "context_full", "cancelled"]


@dataclass(frozen=True)
class Generation:
    """What one call generated, why it ended, and how long it took.

    `ids` never holds the stop id; that is `stop_id` (None unless the reason is "stop"). `prefill_seconds` is
    the prompt's run and the first draw (time to first token), `decode_seconds` all later runs and draws; time
    in the caller's callback is in neither. `speculation` says what drafts did, None without them.
    """

    ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_id: int | None
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    speculation: SpeculationCounts | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens drawn after the first (a stop id counts) by decode time; 0.0 where there are none."""
        drawn = len(self.ids) + (self.stop_id is not None) - 1
        return drawn / self.decode_seconds if drawn > 0 and self.decode_seconds > 0 else 0.0

    @property
    def pending_ids(self) -> tuple[int, ...]:
        """The id drawn last, which the runtime's cache lacks: a next turn's prompt begins with it."""
        return (self.stop_id,) if self.stop_id is not None else self.ids[-1:]


class TokenStream(Iterator[int]):
    """The ids of one generation, one `next` a token; made by `stream`.

    `cancel` ends it before the next token, from any thread. `generation` is the result once it has ended. With
    `speculate` the runtime's cache may hold more than the text until the stream has ended and, after a `cancel`,
    until `generation` was read.
    """

    def __init__(
        self,
        runtime: Runtime,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        options: SamplingOptions,
        stop_ids: Collection[int],
        history: Collection[int],
        speculate: bool,
    ) -> None:
        if max_new_tokens < 0:
            raise InputError(f"max_new_tokens must be 0 or more, but is {max_new_tokens}.")
        check_room(runtime, prompt_ids)
        self._speculation = _speculation(runtime, [*history, *prompt_ids]) if speculate else None
        self._runtime, self._options = runtime, options
        self._prompt = list(prompt_ids)
        self._max_new_tokens = max_new_tokens
        self._stop_ids = frozenset(stop_ids)
        self._seen = {*history, *prompt_ids}
        self._ids: list[int] = []
        self._stop_id: int | None = None
        self._reason: FinishReason | None = None
        self._cancelled = False
        self._prefill_seconds = self._decode_seconds = 0.0

    def __next__(self) -> int:
        if self._reason is None:
            self._reason = self._end_before_run()
        if self._reason is not None:
            self.settle()
            raise StopIteration
        started = time.perf_counter()
        try:
            id = self._draw(self._logits())
        except BaseException:
            self.settle()
            raise
        seconds = time.perf_counter() - started
        if self._ids:
            self._decode_seconds += seconds
        else:
            self._prefill_seconds = seconds
        if id in self._stop_ids:
            self._stop_id, self._reason = id, "stop"
            self.settle()
            raise StopIteration
        self._ids.append(id)
        self._seen.add(id)
        return id

    def cancel(self) -> None:
        """End before the next token; what was generated is kept."""
        self._cancelled = True

    @property
    def generation(self) -> Generation:
        """The result. Raises `RuntimeError` while the stream has not ended."""
        if self._reason is None and self._cancelled:
            self._reason = "cancelled"
        if self._reason is None:
            raise RuntimeError("The stream has not ended yet; iterate to its end or call cancel().")
        self.settle()
        return Generation(
            tuple(self._ids),
            self._reason,
            self._stop_id,
            len(self._prompt),
            self._prefill_seconds,
            self._decode_seconds,
            None if self._speculation is None else self._speculation.counts,
        )

    def _end_before_run(self) -> FinishReason | None:
        if self._cancelled:
            return "cancelled"
        if len(self._ids) >= self._max_new_tokens:
            return "length"
        if self._ids and self._position >= self._runtime.context_length:
            return "context_full"
        return None

    @property
    def _position(self) -> int:
        """Tokens of the text in the cache."""
        return self._runtime.position if self._speculation is None else self._speculation.position

    def _logits(self) -> np.ndarray:
        if not self._ids:
            return self._runtime.prefill(self._prompt)
        if self._speculation is None:
            return self._runtime.decode(self._ids[-1])
        return self._speculation.logits(self._ids[-1], self._max_new_tokens - len(self._ids))

    def settle(self) -> None:
        """Take drafted tokens back out of the cache; needed only where a stream is left before its end."""
        if self._speculation is not None:
            self._speculation.settle()

    def _draw(self, logits: np.ndarray) -> int:
        # The position of the new token, and not its number within this turn, counts the generator's steps, so
        # that a second turn with the same seed does not see the first turn's random numbers again.
        return sample(logits, self._options, self._position, self._seen)


def _speculation(runtime: Runtime, ids: Sequence[int]) -> Speculation:
    if not isinstance(runtime, VerifyingRuntime):
        raise InputError(
            f"The runtime {runtime.name} was not opened for speculation; use open_runtime(..., speculate=True)."
        )
    return Speculation(runtime, ids)


def stream(
    runtime: Runtime,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    options: SamplingOptions,
    stop_ids: Sequence[int],
    history: Collection[int] = (),
    speculate: bool = False,
) -> TokenStream:
    """Iterate over the generated ids; the arguments, the errors and the meaning are those of `generate`.

    Errors in the arguments are raised here, before the first `next`.
    """
    return TokenStream(
        runtime,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        options=options,
        stop_ids=stop_ids,
        history=history,
        speculate=speculate,
    )


def generate(
    runtime: Runtime,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    options: SamplingOptions,
    stop_ids: Sequence[int],
    on_token: Callable[[int], bool | None] | None = None,
    history: Collection[int] = (),
    speculate: bool = False,
) -> Generation:
    """Run the prompt, then draw up to `max_new_tokens` ids; every token runs through the model at most once.

    The prompt is appended to what the cache holds, so a second turn passes only what is new: the first turn's
    `pending_ids` (drawn, but not in the cache), then the new message. `history` names the ids already in the
    cache for the repetition penalty; without it the penalty sees this turn alone. Call `runtime.reset()` to
    start anew.

    With `speculate` drafts from earlier text run several tokens at a time (docs/speculation.md); what comes out is
    the same. Drafts come from `history` (in the order of the text, where it has one), the prompt and what was
    generated. The runtime must be a `VerifyingRuntime`.

    It ends on a stop id ("stop"), after `max_new_tokens` ("length"), when the last id no longer fits into the
    context ("context_full") or when `on_token` returns False ("cancelled"); what was generated is kept. With
    `max_new_tokens` 0 the model does not run. Raises `InputError` for an empty prompt or an unknown id, and
    `ContextFullError` for a prompt that does not fit, both before anything runs.
    """
    tokens = stream(
        runtime,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        options=options,
        stop_ids=stop_ids,
        history=history,
        speculate=speculate,
    )
    try:
        for id in tokens:
            if on_token is not None and on_token(id) is False:
                tokens.cancel()
    finally:
        tokens.settle()  # also where the callback raises
    return tokens.generation


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "�"
_CONTEXT = 8  # tokens kept before the new one: a cut-off character needs 3, decoders that look back fewer


class TextStream:
    """Text from ids as they come: `push` gives what is final, `finish` the rest.

    All pieces joined equal `tokenizer.decode(all ids, skip_special_tokens=True)`. A character whose bytes are
    not complete is held back, and so is a run of byte tokens (`<0x0A>`) until another token ends it, because
    decoders with byte fallback judge such a run as a whole. Each push decodes a window of at most 17 tokens
    (a run of byte tokens aside, which is decoded once), so the cost is linear.

    `tokenizers.decoders.DecodeStream` is not used: it has no `finish`, so a text that ends in an incomplete
    character loses it; it raises "Invalid prefix" where a byte-fallback run turns invalid late; and a run of
    invalid bytes costs it quadratic time.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were given out

    def push(self, id: int) -> str:
        """Append one id and return the text that became final, often empty."""
        token = self._tokenizer.id_to_token(id)
        if token is None or id in self._special:
            return ""  # decoding the whole would skip it as well
        self._window.append(id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._advance(self._text().removesuffix(_REPLACEMENT))
        if len(self._window) > 2 * _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            self._given = len(self._text().removesuffix(_REPLACEMENT))
        return text

    def finish(self) -> str:
        """Return what was held back and start anew."""
        text = self._advance(self._text())
        self._window, self._given = [], 0
        return text

    def _text(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=True)
        return text

    def _advance(self, final: str) -> str:
        new = final[self._given :]
        self._given = max(self._given, len(final))
        return new
