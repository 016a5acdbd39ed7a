"""Rotary position tables, computed as the training framework computes them (float32)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pit_deploy.errors import InputError

_SMALLEST, _LARGEST = 1e-30, 1e30
"""What float32 holds with room for a product."""

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """One rotation for all layers. `parameters` are those of `rope_parameters` (or `rope_scaling`)."""

    kind: str
    theta: float
    dim: int
    parameters: Mapping[str, Any]
    max_position_embeddings: int

    @classmethod
    def from_hf(
        cls, raw: Mapping[str, Any], full: Mapping[str, Any], head_dim: int, layer_type: str | None = None
    ) -> RopeConfig:
        """Read both spellings: `rope_scaling` with `type` or `rope_type`, and `rope_parameters`.

        `raw` is the user's config.json, `full` the same with defaults. Where both fields are there, transformers
        takes `rope_scaling`; both are read, and refused where they rotate differently. Raises `InputError` for
        that, for an unknown kind and for a missing or misplaced number.

        A family whose config has parameters by layer type gets those of `layer_type` (transformers has put the older
        spelling, `rope_local_base_freq`, into the same form).
        """
        by_type = full.get("rope_parameters") or {}
        if isinstance(by_type.get(layer_type), Mapping):
            return cls._read(by_type[layer_type], {}, full, head_dim)
        given = [raw[name] for name in ("rope_scaling", "rope_parameters") if raw.get(name)]
        first, *others = [cls._read(part, raw, full, head_dim) for part in given or [{}]]
        for other in others:
            mine, theirs = first.frequencies(), other.frequencies()
            if not np.array_equal(mine[0], theirs[0]) or mine[1] != theirs[1]:
                raise InputError(
                    f"config.json: rope_scaling ({first._brief()}) and rope_parameters ({other._brief()}) rotate "
                    f"differently; keep one of them."
                )
        return first

    @classmethod
    def _read(
        cls, scaling: Any, raw: Mapping[str, Any], full: Mapping[str, Any], head_dim: int
    ) -> RopeConfig:
        if not isinstance(scaling, Mapping):
            raise InputError(f"config.json: rope_scaling is {scaling!r}; it must be an object.")
        if any(isinstance(value, Mapping) for value in scaling.values()):
            raise InputError(
                "config.json: rope_parameters differ by layer type, which the exporters do not build; "
                f"supported are one of the kinds {', '.join(KINDS)} for all layers."
            )
        kinds = {str(scaling[key]) for key in ("rope_type", "type") if scaling.get(key) is not None} or {
            "default"
        }
        if len(kinds) > 1:
            raise InputError(
                f"config.json: rope_type {scaling['rope_type']!r} and type {scaling['type']!r} differ; keep one."
            )
        kind = kinds.pop()
        if kind not in KINDS:
            raise InputError(
                f"config.json: the rope kind '{kind}' is not known; known are {', '.join(KINDS)}."
            )
        for holder in (raw, scaling):
            partial = holder.get("partial_rotary_factor")
            if partial not in (None, 1, 1.0):
                raise InputError(f"config.json: partial_rotary_factor {partial} is not supported; only 1 is.")
        resolved = full.get("rope_parameters") or {}
        theta = scaling.get("rope_theta", raw.get("rope_theta", resolved.get("rope_theta", 10000.0)))
        check_theta(theta, kind)
        positions = int(full["max_position_embeddings"])
        config = cls(kind, float(theta), head_dim, dict(scaling), positions)
        config.frequencies()  # a missing number is reported here and not in the middle of an export
        return config

    def _brief(self) -> str:
        """Kind and numbers, for a message."""
        numbers = {k: v for k, v in self.parameters.items() if k not in ("type", "rope_type", "rope_theta")}
        return ", ".join(
            [self.kind, *(f"{k} {v!r}" for k, v in numbers.items()), f"rope_theta {self.theta:g}"]
        )

    def frequencies(self) -> tuple[np.ndarray, float]:
        """Angular frequencies, float32 [dim / 2], and the factor on cos and sin."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        wavelengths = np.power(np.float32(self.theta), exponents, dtype=np.float32)
        inverse = np.float32(1.0) / wavelengths
        if self.kind == "linear":
            return inverse / np.float32(self._number("factor")), 1.0
        if self.kind == "llama3":
            return self._llama3(inverse), 1.0
        if self.kind == "yarn":
            return self._yarn(wavelengths)
        return inverse, 1.0

    def tables(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin for positions 0 to `length - 1`, float32 [length, dim / 2]."""
        inverse, factor = self.frequencies()
        angles = np.arange(length, dtype=np.float32)[:, None] * inverse[None, :]
        return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)

    def _number(self, field: str, default: float | None = None) -> float:
        value = self.parameters.get(field)
        if value is None:
            value = default
        if not _is_positive(value):
            raise InputError(
                f"config.json: the rope kind '{self.kind}' needs a positive number {field}, found {value!r}."
            )
        return float(value)  # type: ignore[arg-type]

    def _original_length(self) -> float:
        return self._number("original_max_position_embeddings", self.max_position_embeddings)

    def _llama3(self, inverse: np.ndarray) -> np.ndarray:
        factor, original = self._number("factor"), self._original_length()
        low, high = self._number("low_freq_factor"), self._number("high_freq_factor")
        if low >= high:
            raise InputError(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}.")
        wavelengths = 2 * math.pi / inverse
        slow = np.where(wavelengths > original / low, inverse / factor, inverse)
        smooth = (original / wavelengths - low) / (high - low)
        blended = (1 - smooth) * inverse / factor + smooth * inverse
        between = (wavelengths <= original / low) & (wavelengths >= original / high)
        return np.where(between, blended, slow).astype(np.float32)

    def _yarn(self, wavelengths: np.ndarray) -> tuple[np.ndarray, float]:
        original = self._original_length()
        factor = self._number("factor", self.max_position_embeddings / original)
        fast, slow = self._number("beta_fast", 32.0), self._number("beta_slow", 1.0)

        def dimension(rotations: float) -> float:
            return self.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(fast), dimension(slow)
        if self.parameters.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = (np.arange(self.dim // 2, dtype=np.float32) - low) / ((high - low) or 0.001)
        kept = (1 - np.clip(ramp, 0, 1)).astype(np.float32)
        inverse = (1 / (factor * wavelengths)) * (1 - kept) + (1 / wavelengths) * kept
        return inverse.astype(np.float32), self._yarn_attention_factor(factor)

    def _yarn_attention_factor(self, factor: float) -> float:
        if self.parameters.get("attention_factor") is not None:
            return self._number("attention_factor")

        def scale(multiplier: float) -> float:
            return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

        if self.parameters.get("mscale") and self.parameters.get("mscale_all_dim"):
            return scale(self._number("mscale")) / scale(self._number("mscale_all_dim"))
        return scale(1.0)


def check_theta(theta: object, kind: str) -> None:
    """Raise `InputError` for a base period that makes no rotation: yarn needs one above 1 (it divides by its log)."""
    if not _is_positive(theta) or (kind == "yarn" and theta <= 1):  # type: ignore[operator]
        least = "above 1 for the rope kind 'yarn'" if kind == "yarn" else "above 0"
        raise InputError(f"config.json: rope_theta is {repr(theta)[:60]}; it must be a number {least}.")


def _is_positive(value: object) -> bool:
    """Whether a value of a JSON file is a number that float32 holds, above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and _SMALLEST <= value <= _LARGEST  # type: ignore[operator]
