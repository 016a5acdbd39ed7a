"""Quantise once, emit everywhere: `QuantizedTensor`, the quantisers and the quantisation basis."""

from pit_deploy.quantize.basis import Basis, apply_basis, quantization_basis, token_second_moment
from pit_deploy.quantize.calibration import calibration_text, evaluation_text, read_calibration
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.round_to_nearest import round_to_nearest
from pit_deploy.quantize.tensor import QuantizationError, QuantizedTensor

__all__ = [
    "Basis",
    "QuantizationError",
    "QuantizationOptions",
    "QuantizedTensor",
    "apply_basis",
    "calibration_text",
    "evaluation_text",
    "quantization_basis",
    "read_calibration",
    "round_to_nearest",
    "token_second_moment",
]
