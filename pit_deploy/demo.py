"""`demo`: the whole chain on the sample model, ending in a report that a person can read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pit_deploy.conversion import ConversionReport, convert
from pit_deploy.files import check_output
from pit_deploy.progress import Progress, silent

QUESTION = "What is the capital of France, and what is it known for?"
PRECISIONS = ("fp32", "int8")
TRAINING: dict[str, Any] = {
    "steps": 24,
    "batch_size": 2,
    "block_length": 256,
    "learning_rate": 2e-5,
    "eval_every": 8,
    "eval_share": 0.03,
}
"""The short training of `train`: 12,288 tokens, some minutes on two cores."""


@dataclass
class DemoResult:
    """What the demo made and measured."""

    out: Path
    conversion: ConversionReport
    training: Any = None
    exports: list[Any] = field(default_factory=list)
    parities: list[Any] = field(default_factory=list)
    question: str = QUESTION
    answer: str = ""
    tokens_per_second: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(p.passed for p in self.parities)

    def to_dict(self) -> dict[str, Any]:
        return {
            "out": str(self.out),
            "passed": self.passed,
            "conversion": self.conversion.to_dict(),
            "training": None if self.training is None else self.training.to_dict(),
            "exports": [e.to_dict() for e in self.exports],
            "parity": [p.to_dict() for p in self.parities],
            "chat": {
                "question": self.question,
                "answer": self.answer,
                "tokens_per_second": self.tokens_per_second,
            },
            "seconds": self.seconds,
        }


def demo(
    out: str | Path = "demo",
    *,
    train: bool = False,
    threads: int | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> DemoResult:
    """Sample, convert with the bridge, fold, export fp32 and int8, verify both, answer a question, report.

    Everything lands in `out`: sample/, pit/, folded/, onnx-fp32/, onnx-int8/ and report.html. With `train` the
    converted model is trained on some English text first, into trained/, and what follows is made from that. With
    `overwrite` each part is replaced when it is made anew; a sample that is there is used again.
    """
    from pit_deploy.architecture import DecoderConfig
    from pit_deploy.checkpoint import open_checkpoint
    from pit_deploy.export_options import ExportOptions
    from pit_deploy.exporting import export
    from pit_deploy.folding import fold
    from pit_deploy.parity import verify
    from pit_deploy.reference import calibrate
    from pit_deploy.report import require_report_packages, write_demo_report
    from pit_deploy.running import run
    from pit_deploy.sample import write_sample

    out = Path(out)
    require_report_packages()
    check_output(out, overwrite=overwrite)
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    with _timed(seconds, "sample"):
        if not (out / "sample" / "config.json").is_file():
            write_sample(out / "sample", overwrite=True, progress=progress)
    with _timed(seconds, "convert"):
        conversion = convert(out / "sample", out / "pit", overwrite=True, progress=progress)
    result = DemoResult(out, conversion, seconds=seconds)
    model = out / "pit"
    if train:
        with _timed(seconds, "train"):
            result.training = _train(model, out, progress)
        model = out / "trained"
    with _timed(seconds, "fold"):
        fold(model, out / "folded", overwrite=True, progress=progress)
    with _timed(seconds, "record"):
        checkpoint = open_checkpoint(model)
        context = ExportOptions().context_length(DecoderConfig.from_hf(checkpoint.backbone_config))
        learned = calibrate(checkpoint, context, progress=progress)
    for precision in PRECISIONS:
        with _timed(seconds, f"export {precision}"):
            result.exports.append(
                export(
                    model,
                    out / f"onnx-{precision}",
                    weights=precision,
                    tables=precision,
                    golden=learned,
                    overwrite=True,
                    progress=progress,
                )
            )
        with _timed(seconds, f"verify {precision}"):
            result.parities.append(
                verify(out / f"onnx-{precision}", layers=True, threads=threads, progress=progress)
            )
    with _timed(seconds, "chat"):
        answer = run(out / "onnx-int8", QUESTION, max_new_tokens=96, chat=True, threads=threads)
    result.answer, result.tokens_per_second = answer.text, answer.generation.tokens_per_second
    write_demo_report(
        out / "report.html",
        conversion=conversion,
        exports=result.exports,
        parities=result.parities,
        chat={"prompt": QUESTION, "answer": answer.text, "tokens_per_second": result.tokens_per_second},
        timings=seconds,
    )
    return result


def _train(source: Path, out: Path, progress: Progress) -> Any:
    from pit_deploy.training.data import english_text
    from pit_deploy.training.run import train

    text = out / "training-text.txt"
    text.write_text(english_text(), encoding="utf-8")
    return train(source, out / "trained", text=[text], overwrite=True, progress=progress, **TRAINING)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
