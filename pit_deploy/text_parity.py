"""Compare a stock runner, which gives only text, with the training-time model: its greedy text on the golden prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, ParityError
from pit_deploy.gates import TIE, coarsest, gate_of
from pit_deploy.golden import GoldenRecord, greedy_continuation


@dataclass(frozen=True)
class ExpectedText:
    """A greedy continuation, up to the first tie."""

    text: str
    tokens: int
    """Tokens that make it, an end id left out."""
    ended: bool
    """Whether an end id came next: a client must stop there too."""
    count: int
    """New tokens to ask a client for."""
    reference: str


@dataclass
class TextReport:
    """The result of one comparison of texts."""

    bundle: str
    runtime: str
    precision: str
    prompt: str
    expected: str
    """The greedy continuation of `reference`, up to the first tie."""
    found: str
    tokens: int
    """That `expected` has."""
    required: bool
    """Whether this precision wants the text of training time; otherwise it must be that of the same bundle."""
    ended: bool = False
    """Whether the text has to stop after `expected`."""
    reference: str = "golden record"
    failures: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return self.found == self.expected if self.ended else self.found.startswith(self.expected)

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """The object that `verify --json` writes for a runtime that gives only text (docs/cli.md)."""
        return {**vars(self), "passed": self.passed, "equal": self.equal}

    def raise_if_failed(self) -> None:
        """Raise `ParityError` where the texts had to be equal and are not."""
        if self.failures:
            raise ParityError(
                f"{self.bundle} is out of tolerance in {self.runtime}: {'; '.join(self.failures)}."
            )

    def judge(self) -> None:
        """Fill in how the text differs, if it does."""
        if self.equal:
            return
        found, expected = self.found, self.expected
        at = next((n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
        if at is not None:
            self.failures.append(
                f"its greedy text differs at character {at}: {found[at : at + 20]!r} instead of "
                f"{expected[at : at + 20]!r}"
            )
        elif len(found) < len(expected):
            self.failures.append(
                f"its greedy text stops after {len(found)} characters, before {expected[len(found) :][:20]!r}"
            )
        else:
            self.failures.append(
                f"its greedy text goes on where an end id ends it: {found[len(expected) :][:20]!r}"
            )


def verify_text(bundle: str | Path | Bundle, runtime: str, *, threads: int | None = None) -> TextReport:
    """Check files and tokenizer of a bundle, and the greedy text of a stock runner against its golden record.

    Where rounding may turn the text (the precision's gate does not want it equal), the text must be that of the same
    bundle in a runtime with the same kernels. Raises `InputError` for a damaged bundle, and for a runner that cannot
    open it.
    """
    from pit_deploy.runtimes import open_text_runtime

    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    bundle.check_hashes()
    bundle.check_tokenizer()
    bundle.check_end_ids()
    if bundle.manifest.golden is None:
        raise InputError(f"{bundle.path} carries no golden record; export it again.")
    golden, precision = GoldenRecord.load(bundle.path), bundle.manifest.precision
    golden.check_end_ids(bundle.manifest.end_ids, bundle.manifest.context_length, str(bundle.path))
    gate = gate_of(bundle.manifest)
    opened = open_text_runtime(bundle, runtime, threads=threads)
    if gate.greedy:
        expected = recorded_text(bundle, golden)
    else:
        expected = text_of_same_bundle(bundle, golden, runtime, threads=threads)
    prompt = golden.prompts[golden.greedy_prompt].text
    report = TextReport(
        bundle=str(bundle.path),
        runtime=runtime,
        precision=coarsest(precision.weights, precision.tables),
        prompt=prompt,
        expected=expected.text,
        found=opened.generate(prompt, expected.count),
        tokens=expected.tokens,
        required=gate.greedy,
        ended=expected.ended,
        reference=expected.reference,
    )
    report.judge()
    return report


def recorded_text(bundle: Bundle, golden: GoldenRecord) -> ExpectedText:
    """The greedy text of the record."""
    return _expected(bundle, golden, golden.greedy_ids, golden.greedy_margins, "golden record")


def text_of_same_bundle(
    bundle: Bundle, golden: GoldenRecord, runtime: str, *, threads: int | None = None
) -> ExpectedText:
    """The greedy text that the bundle gives in the runtime whose kernels the client `runtime` has."""
    from pit_deploy.runtimes import TEXT_KERNELS, open_runtime

    opened: Any = open_runtime(bundle, TEXT_KERNELS[runtime], threads=threads)
    ids, margins = greedy_continuation(
        opened, golden.prompts[golden.greedy_prompt].ids, len(golden.greedy_ids), bundle.manifest.end_ids
    )
    return _expected(bundle, golden, ids, margins, f"{opened.name} on the same bundle")


def _expected(
    bundle: Bundle, golden: GoldenRecord, ids: Sequence[int], margins: Sequence[float], reference: str
) -> ExpectedText:
    # A runner keeps each token in its context, the last one too.
    room = bundle.manifest.context_length - len(golden.prompts[golden.greedy_prompt].ids)
    count = min(len(golden.greedy_ids), room)
    sure = next((n for n, margin in enumerate(margins) if margin <= TIE), len(ids))  # before the first tie
    kept = list(ids[: min(sure, count)])
    ended = bool(kept) and kept[-1] in bundle.manifest.end_ids
    kept = kept[:-1] if ended else kept
    # Where the text ends, one token more is asked for: a client that goes on is seen.
    return ExpectedText(bundle.tokenizer.decode(kept), len(kept), ended, min(count + ended, room), reference)
