"""What an export is asked for, and what an exporter gives back: the seam between `pit_deploy` and `pit_export`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pit_deploy.architecture import DecoderConfig
from pit_deploy.errors import InputError
from pit_deploy.folding import FoldedModel, check_layout
from pit_deploy.progress import Progress
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.plan import PRECISIONS, Encoder, QuantizationPlan

DEFAULT_CONTEXT = 2048
QUANTIZERS = ("rtn", "feedback")


@dataclass(frozen=True)
class ExportOptions:
    """Options of `export`, validated where they are made. None means the exporter's own default."""

    to: str = "onnx"
    weights: str | None = None
    """Precision of the backbone's matrices."""
    tables: str | None = None
    """Precision of the token tables; one setting governs the embedding and the head of a shared table."""
    layout: str | None = None
    context: int | None = None
    """Tokens the cache can hold; None: 2048, or the model's own limit where that is shorter."""
    logits: str = "last"
    profile: str | None = None
    block_size: int = 32
    symmetric: bool | None = None
    """Whether blocks have no zero points; None: none at 8 bits, and zero points at 4 bits with error feedback."""
    quantizer: str | None = None
    """`rtn` or `feedback`; None: `feedback` where int4 is asked for, else `rtn`."""
    max_kl: float | None = None
    max_bytes: int | None = None
    """Either lets a search choose int4 or int8 for each group of matrices: the smallest artifact inside a mean
    KL, or the best one of a size (of the model's files)."""
    nested_head: bool | None = None
    """Whether the head shortlists the vocabulary, where that loses next to nothing; None: as False."""
    miss_rate: float | None = None
    """Share of positions whose best token a shortlist may miss, with `nested_head`; None: 0.0005."""
    head_columns: int | None = None
    shortlist: int | None = None
    """Set the nested head by hand, both together."""

    def __post_init__(self) -> None:
        for name in ("weights", "tables"):
            value = getattr(self, name)
            if value is not None and value not in PRECISIONS:
                raise InputError(f"--{name} {value} is not known; choose one of {', '.join(PRECISIONS)}.")
        if self.quantizer is not None and self.quantizer not in QUANTIZERS:
            raise InputError(f"--quantizer {self.quantizer} is not known; choose {' or '.join(QUANTIZERS)}.")
        if self.max_kl is not None and self.max_bytes is not None:
            raise InputError("--max-kl and --max-bytes exclude each other: the search keeps one of them.")
        if self.searches and self.quantizer == "rtn":
            raise InputError("--max-kl and --max-bytes need --quantizer feedback; leave --quantizer out.")
        for option, value in (("--max-kl", self.max_kl), ("--max-bytes", self.max_bytes)):
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{option} {value} is not possible; give a positive number.")
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise InputError(
                f"--block-size {self.block_size} is not possible; give a power of two of at least 16, such as 32 or 64."
            )
        self._check_head()
        check_layout(self.layout)
        if self.logits not in ("last", "all"):
            raise InputError(f"--logits {self.logits} is not known; choose last or all.")
        if self.context is not None and self.context < 1:
            raise InputError(f"--context {self.context} holds no token; give at least 1.")

    def _check_head(self) -> None:
        if (self.head_columns is None) != (self.shortlist is None):
            raise InputError("--head-columns and --shortlist belong together; give both, or --nested-head.")
        if self.nested_head is False and self.head_columns is not None:
            raise InputError("--exact-head and --head-columns exclude each other; leave one out.")
        if self.miss_rate is not None:
            if not 0 < self.miss_rate < 1:
                raise InputError(f"--miss-rate {self.miss_rate} is no share; give a number between 0 and 1.")
            if self.head_columns is not None:
                raise InputError(
                    "--miss-rate and --head-columns exclude each other: one finds what the other sets."
                )
            if not self.nested_head:
                raise InputError("--miss-rate is for a nested head; give --nested-head too, or leave it out.")
        if not self.shortlists:
            return
        if self.to != "onnx" or self.profile not in (None, "default"):
            asked = f"--to {self.to}" + ("" if self.profile is None else f" with profile {self.profile}")
            raise InputError(
                f"a nested head is not built for {asked}; use --to onnx with its profile default, or --exact-head."
            )
        if self.logits != "last":
            raise InputError(
                "a nested head gives the logits of the last position; leave out --logits all, or pass --exact-head."
            )

    @property
    def shortlists(self) -> bool:
        """Whether the head may shortlist."""
        return bool(self.nested_head) or self.head_columns is not None

    @property
    def feedback(self) -> bool:
        """Whether matrices are rounded with error feedback."""
        four_bits = self.searches or "int4" in (self.weights, self.tables)
        return (self.quantizer or ("feedback" if four_bits else "rtn")) == "feedback"

    @property
    def searches(self) -> bool:
        """Whether precision is searched for, tensor group by tensor group."""
        return self.max_kl is not None or self.max_bytes is not None

    def context_length(self, config: DecoderConfig) -> int:
        """The context asked for; raises `InputError` past the positions that the model was trained for."""
        limit = config.max_position_embeddings
        if self.context is None:
            return min(DEFAULT_CONTEXT, limit)
        if self.context > limit:
            raise InputError(
                f"--context {self.context} is more than the model's max_position_embeddings {limit}; give at most "
                f"{limit}."
            )
        return self.context


@dataclass
class Artifact:
    """What an exporter wrote, in the terms of the manifest (docs/bundle.md)."""

    runtime: str
    profile: str
    model_file: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    states: list[dict[str, Any]]
    hidden_states: list[str]
    precision: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    coreml: dict[str, Any] | None = None
    """The manifest's field of that name; None for other runtimes."""


class Exporter(Protocol):
    """Registered as an entry point `pit_deploy.exporters`, made without arguments."""

    name: str
    extra: str
    """The extra of pit-deploy that it needs."""
    default_layout: str
    default_precision: str
    """Of weights and tables."""
    writes_bundle: bool
    """False: the target is a checkpoint directory, complete as `write` leaves it."""
    profiles: tuple[str, ...]
    """The first is the default."""

    def grids(self, options: ExportOptions) -> Mapping[int, QuantizationOptions]:
        """The granularities that the runtime insists on, by bits; empty where the options decide."""
        ...

    def encoder(self, options: ExportOptions) -> Encoder | None:
        """The form of matrices of few bits where that is the runtime's own; None: the quantiser's codes."""
        ...

    def check(self, config: DecoderConfig, options: ExportOptions) -> None:
        """Refuse, before any work, what cannot be built."""
        ...

    def write(
        self,
        model: FoldedModel,
        config: DecoderConfig,
        options: ExportOptions,
        plan: QuantizationPlan,
        tokenizer_length: int,
        directory: Path,
        progress: Progress,
    ) -> Artifact:
        """Write the artifact's own files into `directory` (empty, temporary). Tensors are read one at a time."""
        ...

    def finish(
        self,
        directory: Path,
        config: DecoderConfig,
        *,
        context_length: int,
        bos_id: int | None,
        end_ids: list[int],
    ) -> None:
        """Add what needs the tokenizer's files, which lie in `directory` by now. Bundles only."""
        ...
