"""What the profiles of the Core ML exporter are made of, and what of the options each can take."""

from __future__ import annotations

from dataclasses import dataclass

from pit_deploy.architecture import DecoderConfig
from pit_deploy.errors import InputError
from pit_deploy.export_options import ExportOptions

PREFILL_TOKENS = 64
"""Tokens that the function `prefill` takes at once; where the cache is shorter, as many as it holds."""
HEAD_ROWS = 16384
"""Most output channels of one convolution that the Neural Engine is known to take."""
CACHE_MULTIPLE = 32
"""What the Neural Engine wants of a cache's length."""


@dataclass(frozen=True)
class Profile:
    """One way to build the package.

    `precisions` are those of weights and tables, `forms` says how quantised matrices are stored: `blocks`,
    `palettes` or `channels`.
    """

    name: str
    target: str
    """Minimum system."""
    channel_major: bool
    stateful: bool
    forms: str
    precisions: tuple[str, ...]
    layouts: tuple[str, ...]
    units: str
    """Compute units that the profile is made for, in Core ML's words."""

    def cache_length(self, context_length: int) -> int:
        """Tokens that the cache has room for."""
        if not self.channel_major:
            return context_length
        return -(-context_length // CACHE_MULTIPLE) * CACHE_MULTIPLE

    def dtype(self, options: ExportOptions) -> str:
        """Float type of the program."""
        return "fp32" if options.weights == "fp32" else "fp16"

    def check(self, config: DecoderConfig, options: ExportOptions) -> None:
        """Raise `InputError` for options that the profile cannot build."""
        for option, value in (("--weights", options.weights), ("--tables", options.tables)):
            if value not in self.precisions:
                advice = (
                    " (states of Core ML are float16; --profile stateless has none)"
                    if value == "fp32"
                    else ""
                )
                raise InputError(
                    f"{option} {value} cannot be built with --profile {self.name}{advice}; choose one of "
                    f"{', '.join(self.precisions)}."
                )
        if "fp32" in (options.weights, options.tables) and options.weights != options.tables:
            raise InputError(
                f"--weights {options.weights} and --tables {options.tables} do not go together: a program has one "
                f"float type; choose fp32 for both, or for neither."
            )
        if options.layout is not None and options.layout not in self.layouts:
            raise InputError(
                f"--layout {options.layout} cannot be built with --profile {self.name}; choose "
                f"{' or '.join(self.layouts)}."
            )
        if self.forms == "blocks":
            self._check_blocks(config, options)
        elif options.quantizer == "feedback" or (options.searches and self.forms != "palettes"):
            self._refuse_feedback(options)

    def _check_blocks(self, config: DecoderConfig, options: ExportOptions) -> None:
        quantized = options.searches or any(
            p.startswith("int") for p in (str(options.weights), str(options.tables))
        )
        for field in ("hidden_size", "intermediate_size", "query_size"):
            columns = getattr(config, field)
            if quantized and columns % options.block_size:
                raise InputError(
                    f"config.json: {field} {columns} is not a multiple of --block-size {options.block_size}, and "
                    f"Core ML has whole blocks alone; choose a --block-size that divides it, or --weights fp16."
                )

    def _refuse_feedback(self, options: ExportOptions) -> None:
        asked = "--max-kl or --max-bytes" if options.searches else "--quantizer feedback"
        raise InputError(
            f"{asked} rounds blocks of weights, which --profile {self.name} does not store; choose --profile cpu_gpu, "
            f"or leave it out."
        )


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "cpu_gpu",
            "iOS18",
            channel_major=False,
            stateful=True,
            forms="blocks",
            precisions=("fp16", "int8", "int4"),
            layouts=("untied", "shared"),
            units="cpuAndGPU",
        ),
        Profile(
            "neural_engine",
            "iOS18",
            channel_major=True,
            stateful=True,
            forms="palettes",
            precisions=("fp16", "int8", "int4"),
            layouts=("untied",),
            units="cpuAndNeuralEngine",
        ),
        Profile(
            "stateless",
            "iOS17",
            channel_major=False,
            stateful=False,
            forms="channels",
            precisions=("fp32", "fp16", "int8"),
            layouts=("untied", "shared"),
            units="all",
        ),
    )
}
