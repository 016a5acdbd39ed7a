"""Compare a stock runner, which gives only text, with the training-time model: its greedy text on the golden prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError, ParityError
from pit_deploy.gates import TIE, coarsest, gate_for
from pit_deploy.golden import GoldenRecord


@dataclass
class TextReport:
    """The result of one comparison of texts."""

    bundle: str
    runtime: str
    precision: str
    prompt: str
    expected: str
    """The greedy continuation at training time, up to the first tie."""
    found: str
    tokens: int
    """That `expected` has."""
    required: bool
    """Whether the gate of this precision wants the texts to be equal."""
    failures: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return self.found.startswith(self.expected)

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        """The object that `verify --json` writes for a runtime that gives only text (docs/cli.md)."""
        return {**vars(self), "reference": "golden record", "passed": self.passed, "equal": self.equal}

    def raise_if_failed(self) -> None:
        """Raise `ParityError` where the texts had to be equal and are not."""
        if self.failures:
            raise ParityError(
                f"{self.bundle} is out of tolerance in {self.runtime}: {'; '.join(self.failures)}."
            )


def verify_text(bundle: str | Path | Bundle, runtime: str, *, threads: int | None = None) -> TextReport:
    """Check files and tokenizer of a bundle, and the greedy text of a stock runner against its golden record.

    Raises `InputError` for a damaged bundle, and for a runner that cannot open it.
    """
    from pit_deploy.runtimes import open_text_runtime

    bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    bundle.check_hashes()
    bundle.check_tokenizer()
    if bundle.manifest.golden is None:
        raise InputError(f"{bundle.path} carries no golden record; export it again.")
    golden, precision = GoldenRecord.load(bundle.path), bundle.manifest.precision
    gate = gate_for(bundle.manifest.runtime, precision.weights, precision.tables)
    prompt = golden.prompts[golden.greedy_prompt].text
    ids = _without_ties(golden)
    if ids and ids[-1] in bundle.manifest.end_ids:
        ids = ids[:-1]
    expected = bundle.tokenizer.decode(ids)
    opened = open_text_runtime(bundle, runtime, threads=threads)
    report = TextReport(
        bundle=str(bundle.path),
        runtime=runtime,
        precision=coarsest(precision.weights, precision.tables),
        prompt=prompt,
        expected=expected,
        found=opened.generate(prompt, len(golden.greedy_ids)),
        tokens=len(ids),
        required=gate.greedy,
    )
    if gate.greedy and not report.equal:
        at = next(
            (n for n, (a, b) in enumerate(zip(report.found, expected, strict=False)) if a != b),
            len(report.found),
        )
        report.failures.append(
            f"its greedy text differs at character {at}: {report.found[at : at + 20]!r} instead of "
            f"{expected[at : at + 20]!r}"
        )
    return report


def _without_ties(golden: GoldenRecord) -> list[int]:
    """The greedy ids before the first step at which another id was as good."""
    for number, margin in enumerate(golden.greedy_margins):
        if margin <= TIE:
            return golden.greedy_ids[:number]
    return golden.greedy_ids
