import numpy as np
import pytest

from pit_deploy.errors import InputError
from pit_deploy.quantize import QuantizationOptions, QuantizedTensor, round_to_nearest
from pit_deploy.quantize.plan import QuantizationPlan

WEIGHT = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)


def test_precision_by_role() -> None:
    plan = QuantizationPlan("int4", "fp16")
    encoded = plan.encode("w", WEIGHT, "weights")
    assert isinstance(encoded, QuantizedTensor)
    expected = round_to_nearest(WEIGHT, QuantizationOptions(4))
    np.testing.assert_array_equal(encoded.codes, expected.codes)
    np.testing.assert_array_equal(encoded.scales, expected.scales)
    table = plan.encode("t", WEIGHT, "tables")
    assert isinstance(table, np.ndarray) and table.dtype == np.float16
    assert [e["name"] for e in plan.errors] == ["w"]
    assert plan.errors[0]["bits"] == 4 and plan.errors[0]["symmetric"] is True
    assert (plan.precision("weights"), plan.precision("tables")) == ("int4", "fp16")


def test_single_tensors_may_differ() -> None:
    ready = round_to_nearest(WEIGHT, QuantizationOptions(8, 64, symmetric=False))
    plan = QuantizationPlan("int4", "fp32", prepared={"a": ready}, bits={"b": 8, "c": 32})
    assert plan.encode("a", WEIGHT, "tables") is ready
    assert plan.encode("b", WEIGHT, "weights").bits == 8
    assert plan.encode("c", WEIGHT, "weights").dtype == np.float32
    assert plan.encode("d", WEIGHT, "weights").bits == 4
    assert [(e["name"], e["bits"], e["block_size"]) for e in plan.errors] == [
        ("a", 8, 64),
        ("b", 8, 32),
        ("d", 4, 32),
    ]
    assert plan.errors[0]["relative_rms"] == ready.error_against(WEIGHT).relative_rms


def test_what_does_not_fit_is_refused() -> None:
    ready = round_to_nearest(WEIGHT, QuantizationOptions(8))
    with pytest.raises(InputError, match=r"a was quantised as \[4, 64\] and is stored as \[3, 64\]"):
        QuantizationPlan("int4", "int4", prepared={"a": ready}).encode("a", WEIGHT[:3], "weights")
    with pytest.raises(InputError, match="bits of a is 5"):
        QuantizationPlan("int4", "int4", bits={"a": 5})
    with pytest.raises(InputError, match="int3"):
        QuantizationPlan("int3", "int4")
