"""What a benchmark says: the object that `bench --json` and the apps write (docs/benchmarks.md)."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field

from pit_deploy.schema_part import SchemaPart

FORMAT: Final = "pit-deploy bench"
FORMAT_VERSION: Final = 1
SCHEMA_PATH = Path(__file__).parent.parent / "schemas" / "bench.schema.json"

Count = Annotated[int, Field(strict=True, ge=1)]
Size = Annotated[int, Field(strict=True, ge=0)]
Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


class Samples(SchemaPart):
    """A figure measured several times."""

    median: Figure
    """Median of `samples`."""
    min: Figure
    """Smallest of `samples`."""
    max: Figure
    """Largest of `samples`."""
    samples: Annotated[tuple[Figure, ...], Field(min_length=1)]
    """The values in the order of measuring."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Samples:
        """Median, smallest and largest of `values`, of which there is at least one."""
        kept = tuple(float(value) for value in values)
        return cls(median=statistics.median(kept), min=min(kept), max=max(kept), samples=kept)


class Machine(SchemaPart):
    """Where it was measured."""

    system: Name
    """Operating system and its release."""
    architecture: Name
    """Processor architecture, for example `x86_64` or `arm64`."""
    processor: Name | None
    """Model of the processor or the device."""
    cores: Count | None
    """Logical cores that the process may use."""
    memory_bytes: Count | None
    """Memory of the machine."""
    load_average: Figure | None
    """Mean number of running processes in the minute before; other work shows here."""


class Settings(SchemaPart):
    """What was asked for."""

    threads: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Numbers of CPU threads."""
    prompt_tokens: Annotated[tuple[Count, ...], Field(min_length=1)]
    """Lengths of the prompts."""
    depths: Annotated[tuple[Size, ...], Field(min_length=1)]
    """Tokens in the cache before decoding."""
    new_tokens: Count
    """Tokens decoded, one at a time, for one sample."""
    repeats: Count
    """Samples of each figure."""
    text: Name
    """Where the token ids came from."""


class Bandwidth(SchemaPart):
    """Reading from memory, measured among the other figures."""

    threads: Count
    """Threads that read."""
    bytes_per_second: Samples
    """Bytes read a second."""


class LoadTimes(SchemaPart):
    """Starts in processes of their own."""

    seconds: Samples
    """From opening the artifact, libraries imported, to a session that can run."""
    first_token_seconds: Samples
    """From opening the artifact to the first token after the shortest prompt."""
    resident_share: Annotated[float, Field(ge=0, le=1)] | None
    """Largest share of the artifact's pages in the file cache before opening: 0 is cold, 1 is warm; null where
    the system does not tell."""


class Load(SchemaPart):
    """Starting up."""

    cold: LoadTimes | None
    """With the artifact's pages dropped from the file cache; null where the system cannot drop them."""
    warm: LoadTimes | None
    """With the artifact's pages in the file cache."""


class Memory(SchemaPart):
    """Resident memory of a process that holds this artifact alone; mapped file pages count."""

    before_load_bytes: Samples
    """Before opening: the interpreter or app, with the runtime's libraries."""
    after_load_bytes: Samples
    """After opening."""
    private_after_load_bytes: Samples | None
    """The part of it that is not file pages, which the system could drop and read again."""
    peak_bytes: Samples
    """Largest until the longest prompt and the deepest decoding had run."""


class Prefill(SchemaPart):
    """A prompt into an empty cache."""

    tokens: Count
    """Length of the prompt."""
    tokens_per_second: Samples
    """Prompt tokens by the time to the first token."""
    time_to_first_token_seconds: Samples
    """From the ids of the prompt to the first greedy token, model loaded and warmed up."""


class Decode(SchemaPart):
    """One token at a time."""

    depth: Size
    """Tokens in the cache before."""
    tokens: Count
    """Tokens decoded."""
    tokens_per_second: Samples
    """`tokens` by the time of all of them."""
    bandwidth_share: Figure | None
    """`weight_bytes_per_token` times the median, by the largest bandwidth measured at this number of threads."""


class Thermal(SchemaPart):
    """How warm a device was, and what its clocks followed."""

    governor: Name | None
    """Of the processor's clocks; several where cores differ, null where the device does not tell."""
    zone: Name | None
    """The zone that showed the temperatures, the warmest of the processor's; null where none can be read."""
    degrees_before: Samples | None
    """Celsius at the start of each round, after cooling down."""
    degrees_after: Samples | None
    """Celsius at its end."""


class Run(SchemaPart):
    """The figures of one subject at one number of threads."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=False)

    threads: Count
    """CPU threads."""
    error: Name | None
    """Why figures are missing: what failed, or how the process ended; null where all are there."""
    other_cores: Figure | None
    """Mean number of cores that other processes kept busy while prefill and decode were timed; null where the
    system does not tell."""
    load: Load | None
    """Starting up."""
    memory: Memory | None
    """Resident memory."""
    prefill: tuple[Prefill, ...]
    """By length of the prompt."""
    decode: tuple[Decode, ...]
    """By depth."""
    thermal: Thermal | None = None
    """Of a device; null or absent elsewhere."""


class Quality(SchemaPart):
    """How far the outputs are from the training-time model, on the golden record of the first bundle."""

    reference: Name
    """Bundle with the record."""
    positions: Count
    """Positions compared, step by step."""
    mean_kl: Figure
    """Mean KL divergence from the reference, in nats."""
    top1: Annotated[float, Field(ge=0, le=1)]
    """Share of positions with the reference's largest logit, ties aside."""


class Subject(SchemaPart):
    """One artifact in one runtime."""

    name: Name
    """Unique among the subjects."""
    kind: Literal["bundle", "llama.cpp", "genai"]
    """A bundle of ours, or whose artifact it is."""
    runtime: Name
    """The runtime with its version."""
    path: Name
    """The bundle, file or folder measured."""
    precision: Name
    """Number formats, in the words of its maker."""
    model_bytes: Size
    """Bytes on disk of graph and weights."""
    total_bytes: Size
    """Bytes on disk of everything that belongs to it."""
    weight_bytes_per_token: Size | None
    """Bytes of weights that one token has to read; null where it is not known."""
    quality: Quality | None
    """Outputs against the reference; null where it was not compared."""
    runs: tuple[Run, ...]
    """By number of threads."""
    notes: tuple[Name, ...]
    """What a reader of the figures has to know."""


class Ratio(SchemaPart):
    """A bundle against another subject: above 1 the bundle is faster."""

    subject: Name
    """The bundle."""
    against: Name
    """The other."""
    threads: Count
    """CPU threads of both."""
    what: Literal["prefill", "decode"]
    """Which figure."""
    at: Size
    """Length of the prompt, or depth."""
    ratio: Samples
    """Quotients of samples measured one after the other."""


class BenchReport(SchemaPart):
    """A whole benchmark."""

    format: Literal["pit-deploy bench"] = FORMAT
    """Always `pit-deploy bench`."""
    format_version: Literal[1] = FORMAT_VERSION
    """Version of this format, 1."""
    created_by: dict[Name, Name]
    """Versions of the tools, by name."""
    machine: Machine
    """Where it was measured."""
    settings: Settings
    """What was asked for."""
    bandwidth: tuple[Bandwidth, ...]
    """Reading from memory, by number of threads; empty where it was not measured."""
    subjects: Annotated[tuple[Subject, ...], Field(min_length=1)]
    """What was measured: bundles first."""
    ratios: tuple[Ratio, ...]
    """Every bundle against every other maker's subject."""
    notes: tuple[Name, ...]
    """What went otherwise than asked."""

    def to_dict(self) -> dict[str, Any]:
        """The object that `bench --json` writes (docs/benchmarks.md, schemas/bench.schema.json)."""
        return self.model_dump(mode="json")

    def subject(self, name: str) -> Subject:
        """The subject called `name`."""
        return next(subject for subject in self.subjects if subject.name == name)

    def runs(self) -> Iterator[tuple[Subject, Run]]:
        """Every run with its subject, by threads and then by subject."""
        for threads in self.settings.threads:
            for subject in self.subjects:
                yield from ((subject, run) for run in subject.runs if run.threads == threads)


def read_report(data: Any) -> BenchReport:
    """The report in parsed JSON; raises pydantic's `ValidationError` where it is none."""
    return BenchReport.model_validate(data)


def schema_text() -> str:
    """The JSON Schema (2020-12) in `SCHEMA_PATH`; `python -m pit_deploy.benchmark.report` prints it."""
    schema = BenchReport.model_json_schema(mode="serialization")
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A {FORMAT} report, format version {FORMAT_VERSION}",
    }
    return json.dumps(head | plain_schema(schema), indent=2, ensure_ascii=False) + "\n"


def plain_schema(node: Any, properties: bool = False) -> Any:
    """A copy without pydantic's titles and defaults, which repeat names and differ between its versions."""
    if isinstance(node, list):
        return [plain_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    dropped = () if properties else ("title", "default")
    plain = {k: plain_schema(v, k in ("properties", "$defs")) for k, v in node.items() if k not in dropped}
    if not properties and isinstance(plain.get("description"), str):
        plain["description"] = " ".join(plain["description"].split())
    return plain


if __name__ == "__main__":
    print(schema_text(), end="")
