"""The parity matrix as data: the object in parity.json (docs/parity.md, schemas/parity.schema.json)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from pit_deploy.parity import ParityReport
from pit_deploy.schema_part import SchemaPart
from pit_deploy.text_parity import TextReport

FORMAT: Final = "pit-deploy parity"
FORMAT_VERSION: Final = 1
SCHEMA_PATH = Path(__file__).parent.parent / "schemas" / "parity.schema.json"

PRECISIONS = ("fp32", "fp16", "int8", "int4", "mixed")
LAYOUTS = ("untied", "shared")
Status = Literal["passed", "out_of_tolerance", "failed", "not_run"]

Count = Annotated[int, Field(strict=True, ge=0)]
Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1)]


class Row(SchemaPart):
    """A setting of a checkpoint; each target has an artifact of it."""

    checkpoint: Name
    """Name of the checkpoint."""
    layout: Literal["untied", "shared"]
    """Two tables, or one for embedding and head."""
    precision: Literal["fp32", "fp16", "int8", "int4", "mixed"]
    """Of weights and tables; `mixed` where tensors differ."""


class Column(SchemaPart):
    """A runtime or a client."""

    name: Name
    """As `verify --runtime` knows it, or `torch` and `transformers`, which run a fold."""
    target: Name
    """What it opens: the target of an export, `fold` or `hf`."""
    version: Name | None
    """Version of its package; null where it has none."""
    gives: Literal["logits", "text"]
    """What is compared."""


class Limits(SchemaPart):
    """The gate of a cell; null where a figure decides nothing."""

    max_abs: Figure | None
    """Of `max_abs_logit_error`."""
    mean_kl: Figure
    """Of `mean_kl`."""
    top1: Share
    """The least `top1`."""
    greedy: bool
    """Whether the greedy continuation must be the reference's."""
    layer: Figure
    """Relative error of a layer's hidden state past which the layer counts as diverging."""


class LayerFigure(SchemaPart):
    """Relative error of the hidden state after a layer."""

    layer: Count
    """Layers run; 0 is the embedding."""
    median: Figure | None
    """Over the positions; null where it is not finite."""
    largest: Figure | None
    """Over the positions; null where it is not finite."""


class Positions(SchemaPart):
    """Figures by position of the prompts, one after the other; null is not finite."""

    prompt_lengths: tuple[Count, ...]
    """Tokens of each prompt."""
    kl: tuple[Figure | None, ...]
    """KL divergence from the reference in nats."""
    max_abs: tuple[Figure | None, ...]
    """Largest error of a compared logit."""
    top1: tuple[Literal[0, 1], ...]
    """Whether the largest logit is the reference's, ties aside."""


class Logits(SchemaPart):
    """A comparison of logits."""

    reference: Name
    """What it was compared with."""
    gate: Limits
    """What decides."""
    positions: Count
    """Positions compared."""
    max_abs_logit_error: Figure | None
    """Largest over positions; null where it is not finite."""
    mean_kl: Figure | None
    """Mean over positions, in nats; null where it is not finite."""
    worst_kl: Figure | None
    """Largest over positions; null where it is not finite."""
    top1: Share
    """Share of positions with the reference's largest logit."""
    one_pass_against_steps_max_abs: Figure | None
    """Largest difference between one pass and step by step in the runtime itself."""
    greedy_tokens: Count
    """Tokens of the reference's greedy continuation."""
    greedy_equal: Count
    """Leading tokens that agree, ties aside."""
    first_diverging_layer: Count | None
    """The first of `layers` whose median is past the gate; null where none is or none were compared."""
    layers: tuple[LayerFigure, ...]
    """Empty where the runtime cannot show its hidden states."""
    per_position: Positions
    """The same figures by position."""


class Text(SchemaPart):
    """A comparison of greedy texts."""

    reference: Name
    """What it was compared with."""
    prompt: str
    """The text continued."""
    expected: str
    """The continuation at training time (or in the bundle's usual runtime), up to the first tie."""
    found: str
    """The client's."""
    tokens: Count
    """That `expected` has."""


class Cell(SchemaPart):
    """One row in one column."""

    row: Row
    """Which row."""
    runtime: Name
    """Which column."""
    status: Status
    """`passed`; `out_of_tolerance`: compared, and a figure is past its gate; `failed`: nothing could be compared,
    because the artifact is damaged or the runtime ended; `not_run`: the combination does not exist or a tool is
    absent."""
    reasons: tuple[Name, ...]
    """Why it did not pass; empty where it did."""
    artifact: Name | None
    """Name of the bundle or folder that was opened."""
    artifact_bytes: Count | None
    """Its size."""
    logits: Logits | None
    """Null where logits were not compared."""
    text: Text | None
    """Null where text was not compared."""
    notes: tuple[Name, ...]
    """What a reader has to know."""
    seconds: Figure | None
    """Time of the check on this machine, null where nothing ran or the runtime was emulated. No measure of speed."""

    @property
    def name(self) -> str:
        """Unique in the matrix, and fit for a link."""
        name = "-".join((self.row.checkpoint, self.row.layout, self.row.precision, self.runtime))
        return re.sub(r"[^\w.:-]", "_", name)

    @property
    def red(self) -> bool:
        return self.status in ("out_of_tolerance", "failed")


class Matrix(SchemaPart):
    """The whole table."""

    format: Literal["pit-deploy parity"] = FORMAT
    """Always `pit-deploy parity`."""
    format_version: Literal[1] = FORMAT_VERSION
    """Version of this format, 1."""
    created_by: dict[Name, Name]
    """Versions of the tools, by name."""
    machine: Name
    """Processor architecture and operating system."""
    columns: tuple[Column, ...]
    """Runtimes and clients, in the order of the table."""
    rows: tuple[Row, ...]
    """In the order of the table."""
    cells: tuple[Cell, ...]
    """One for each row and column, row by row."""

    @property
    def passed(self) -> bool:
        """Whether something ran and nothing is red."""
        return any(c.status == "passed" for c in self.cells) and not any(c.red for c in self.cells)

    def cell(self, row: Row, runtime: str) -> Cell:
        """The cell of a row and a column; `KeyError` where there is none."""
        for cell in self.cells:
            if cell.row == row and cell.runtime == runtime:
                return cell
        raise KeyError((row, runtime))

    def table(self) -> Iterator[tuple[Row, list[Cell]]]:
        """Rows with their cells in the order of the columns."""
        for row in self.rows:
            yield row, [self.cell(row, column.name) for column in self.columns]

    def count(self, status: Status) -> int:
        return sum(cell.status == status for cell in self.cells)

    def to_dict(self) -> dict[str, Any]:
        """The object in parity.json."""
        return self.model_dump(mode="json")


def read_matrix(data: Any) -> Matrix:
    """The matrix in parsed JSON; raises pydantic's `ValidationError` where it is none."""
    return Matrix.model_validate(data)


def logits_of(report: ParityReport) -> Logits:
    """What a comparison of logits found, as the table keeps it."""
    found = report.to_dict()
    per_position = {**found["per_position"], "prompt_lengths": found["prompt_lengths"]}
    kept = {name: found[name] for name in Logits.model_fields if name not in ("per_position",)}
    return Logits.model_validate({**kept, "per_position": per_position})


def text_of(report: TextReport) -> Text:
    """What a comparison of texts found, as the table keeps it."""
    return Text(
        reference=report.reference,
        prompt=report.prompt,
        expected=report.expected,
        found=report.found,
        tokens=report.tokens,
    )


def schema_text() -> str:
    """The JSON Schema (2020-12) in `SCHEMA_PATH`; `python -m pit_deploy.matrix.table` prints it."""
    from pit_deploy.benchmark.report import plain_schema

    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A {FORMAT} matrix, format version {FORMAT_VERSION}",
    }
    schema = plain_schema(Matrix.model_json_schema(mode="serialization"))
    return json.dumps(head | schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
