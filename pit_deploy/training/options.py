"""What a training run is asked to do, checked where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pit_deploy.errors import InputError

PRECISIONS = ("fp32", "bf16")
_ONE_OR_MORE = (
    "steps",
    "batch_size",
    "accumulate",
    "lora",
    "anneal_bridge",
    "eval_every",
    "log_every",
    "save_every",
    "keep",
)
_LEAST = {**dict.fromkeys(_ONE_OR_MORE, 1), "block_length": 2}


@dataclass(frozen=True)
class TrainingOptions:
    """Options of one run. Raises `InputError` for values that cannot be meant.

    `learning_rate` is the backbone's peak; `interface_rate` that of the token table which the interface stands
    for (None: the same), see `optimizers`; `memory_decay` the exponent of the schedule for `Z`. `steps` None is one
    pass over the text. `interface_step` is `table` (Z and T as one, AdamW's default, see `table_step`) or `apart`.
    `accumulate` micro-batches of `batch_size` blocks, on each process, make one step.
    """

    steps: int | None = None
    batch_size: int = 8
    accumulate: int = 1
    block_length: int | None = None
    learning_rate: float = 1e-4
    interface_rate: float | None = None
    transform_rate: float | None = None
    memory_decay: float = 1.0
    warmup: float = 0.05
    final_rate: float = 0.1
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    optimizer: str = "adamw"
    interface_step: str | None = None
    memory: str | None = None
    anneal_bridge: int | None = None
    scale: float | None = None
    multiplier: float | None = None
    precision: str = "fp32"
    gradient_checkpointing: bool = False
    lora: int | None = None
    adapter: bool = False
    fsdp: bool = False
    eval_share: float = 0.05
    eval_every: int | None = None
    log_every: int = 1
    tensorboard: bool = False
    save_every: int | None = None
    keep: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise InputError(f"{_flag(name)} is {value}; {low} is the least.")
        for name in (
            "learning_rate",
            "interface_rate",
            "transform_rate",
            "scale",
            "multiplier",
            "max_grad_norm",
        ):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"{_flag(name)} is {value}; a positive number is due.")
        for name in ("warmup", "final_rate", "eval_share", "weight_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{_flag(name)} is {getattr(self, name)}; from 0 up to below 1 is due.")
        choices: dict[str, tuple[str | None, ...]] = {
            "optimizer": ("adamw", "muon"),
            "memory": (None, "frozen", "stiefel"),
            "interface_step": (None, "table", "apart"),
            "precision": PRECISIONS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                words = " or ".join(c for c in allowed if c)
                raise InputError(f"{_flag(name)} {getattr(self, name)} is not known; choose {words}.")
        self._check_combinations()

    @property
    def steps_table(self) -> bool:
        """Whether a trained `Z` is stepped together with `T`."""
        if self.interface_step is None:
            return self.optimizer == "adamw" and self.transform_rate is None
        return self.interface_step == "table"

    def _check_combinations(self) -> None:
        if self.adapter and self.lora is None:
            raise InputError("--adapter keeps what --lora trains apart; give --lora RANK too.")
        if self.lora is not None and self.anneal_bridge is not None:
            raise InputError(
                "--lora leaves the interface as it is and --anneal-bridge changes it; give one of them."
            )
        if self.lora is not None and self.fsdp:
            raise InputError("--lora trains few weights and --fsdp spreads many; give one of them.")
        if self.interface_step == "table":
            if self.optimizer == "muon":
                raise InputError(
                    "--interface-step table is for --optimizer adamw; with muon Z and T are stepped apart."
                )
            if self.memory == "frozen":
                raise InputError(
                    "--interface-step table moves Z and --memory frozen does not; give one of them."
                )
            if self.transform_rate is not None:
                raise InputError(
                    "--transform-rate is the step of L by itself; give it with --interface-step apart."
                )
        if self.optimizer == "muon" and self.fsdp:
            raise InputError(
                "--optimizer muon needs whole matrices and --fsdp spreads them; give one of them."
            )
        if self.steps is not None and self.anneal_bridge is not None and self.anneal_bridge > self.steps:
            raise InputError(
                f"--anneal-bridge {self.anneal_bridge} is longer than --steps {self.steps}; the bridge must reach "
                f"its end within the run."
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
