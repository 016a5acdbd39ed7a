"""Quantise once, emit everywhere: `QuantizedTensor`, the quantisers and the quantisation basis."""

from pit_deploy.quantize.basis import Basis, apply_basis, quantization_basis, token_second_moment
from pit_deploy.quantize.calibration import calibration_text, evaluation_text, read_calibration
from pit_deploy.quantize.error_feedback import FeedbackOptions, quantize_with_feedback
from pit_deploy.quantize.options import QuantizationOptions
from pit_deploy.quantize.round_to_nearest import round_to_nearest
from pit_deploy.quantize.scale_search import round_with_search
from pit_deploy.quantize.tensor import QuantizationError, QuantizedTensor

__all__ = [
    "Basis",
    "FeedbackOptions",
    "QuantizationError",
    "QuantizationOptions",
    "QuantizedTensor",
    "apply_basis",
    "calibration_text",
    "evaluation_text",
    "quantization_basis",
    "quantize_with_feedback",
    "read_calibration",
    "round_to_nearest",
    "round_with_search",
    "token_second_moment",
]
