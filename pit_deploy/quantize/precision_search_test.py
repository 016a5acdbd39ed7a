import json
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from pit_deploy.errors import InputError
from pit_deploy.quantize.precision_search import Group, choose_precision


def group(name: str, kl: float, size: int = 100, float_kl: bool = False) -> Group:
    sizes = {8: 2 * size, 4: size}
    return Group(name, (name,), {**sizes, 32: 8 * size} if float_kl else sizes, {8: kl / 100, 4: kl})


def joint(kl: Mapping[str, float]) -> Callable[[Mapping[str, int]], float]:
    """A KL that isn't additive: half as much again."""
    return lambda bits: 1.5 * sum(kl[n] * {4: 1, 8: 0.01, 32: 0}[b] for n, b in bits.items())


def test_smallest_choice_inside_the_gate() -> None:
    kl = {"a": 0.02, "b": 0.001, "c": 0.005, "d": 0.1}
    groups = [group(n, v) for n, v in kl.items()]
    choice = choose_precision(groups, joint(kl), max_kl=0.02, fixed_bytes=7)
    assert choice.bits == {"a": 8, "b": 4, "c": 4, "d": 8}
    assert choice.nbytes == 7 + 200 + 100 + 100 + 200
    assert choice.kl == pytest.approx(joint(kl)(choice.bits)) and choice.kl <= 0.02
    assert json.loads(json.dumps(choice.to_dict()))["groups"][1]["bits"] == 4


def test_a_wider_gate_never_gives_a_larger_artifact() -> None:
    rng = np.random.default_rng(0)
    kl = {f"g{i}": float(v) for i, v in enumerate(rng.exponential(0.01, 20))}
    groups = [group(n, v, int(rng.integers(50, 200)), float_kl=True) for n, v in kl.items()]
    sizes = []
    for gate in (1e-5, 1e-3, 1e-2, 0.05, 0.1, 1.0):
        choice = choose_precision(groups, joint(kl), max_kl=gate)
        assert choice.kl <= gate
        sizes.append(choice.nbytes)
        again = choose_precision(groups, joint(kl), max_bytes=choice.nbytes)
        assert again.bits == choice.bits
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == sum(g.nbytes[4] for g in groups)
    assert 32 in choose_precision(groups, joint(kl), max_kl=1e-5).bits.values()


def test_gates_that_cannot_be_met() -> None:
    kl = {"a": 0.02, "b": 0.001}
    groups = [group(n, v) for n, v in kl.items()]
    with pytest.raises(InputError, match=r"--max-kl 1e-06 .* best reached is 0.000315, with 8-bit"):
        choose_precision(groups, joint(kl), max_kl=1e-6)
    with pytest.raises(InputError, match="smallest choice has 205 bytes"):
        choose_precision(groups, joint(kl), max_bytes=204, fixed_bytes=5)
    with pytest.raises(InputError, match="give one of"):
        choose_precision(groups, joint(kl))


def test_few_joint_choices_are_measured_and_the_best_is_found() -> None:
    """Against every choice on every line. Effects add to a power, and each counts other than it does alone."""
    rng = np.random.default_rng(0)
    alone = {f"g{i:03d}": float(v) for i, v in enumerate(rng.lognormal(-7, 1, 100))} | {"table": 0.02}
    effect = {name: kl * float(rng.lognormal(0, 0.5)) for name, kl in alone.items()}
    share = {4: 1.0, 6: 0.05, 8: 0.0}
    size = {name: 4000 if name == "table" else 100 for name in alone}

    def measure(bits: Mapping[str, int]) -> float:
        return sum(effect[name] * share[count] for name, count in bits.items()) ** 1.2 + 1e-4

    groups = [
        Group(name, (name,), {b: b * size[name] for b in (4, 6, 8)}, {4: kl, 6: kl * share[6]})
        for name, kl in alone.items()
    ]
    steps = [(n, 6, kl * share[6]) for n, kl in alone.items() if n != "table"]
    steps += [(n, 4, kl * (1 - share[6])) for n, kl in alone.items() if n != "table"]
    counts = []
    for gate in (2e-4, 1e-3, 5e-3, 0.02, 0.1):
        sizes = []
        for table in (8, 6, 4):
            bits = dict.fromkeys(alone, 8) | {"table": table}
            for name, coarser, _ in [("table", table, 0.0), *sorted(steps, key=lambda step: step[2])]:
                bits[name] = coarser
                if measure(bits) <= gate:
                    sizes.append(sum(count * size[name] for name, count in bits.items()))
        choice = choose_precision(groups, measure, max_kl=gate)
        assert choice.nbytes == min(sizes) and choice.kl == measure({g.group: g.bits for g in choice.groups})
        counts.append(len(choice.trials))
    assert max(counts) <= 16 and sum(counts) <= 60, counts  # bisection alone takes 9 a line


@pytest.mark.parametrize("cliff", [3, 20, 60])
def test_a_choice_that_comes_otherwise_than_foreseen(cliff: int) -> None:
    """A group that alone does nothing ruins the model with others."""
    groups = [group(f"g{i:02d}", 1e-4 * (i + 1)) for i in range(64)]

    def measure(bits: Mapping[str, int]) -> float:
        low = sorted(name for name, count in bits.items() if count == 4)
        return 1e-4 * len(low) + (1.0 if f"g{cliff:02d}" in low else 0.0)

    choice = choose_precision(groups, measure, max_kl=0.05)
    assert choice.kl <= 0.05
    moved = [g.group for g in choice.groups if g.bits == 4]
    assert moved == [f"g{i:02d}" for i in range(cliff)]
