"""The choice of a nested head on a made-up head whose logits concentrate, and on one whose logits do not."""

import dataclasses

import numpy as np
import pytest

from pit_deploy.folding import SharedTable
from pit_deploy.quantize import apply_basis, quantization_basis, token_second_moment
from pit_deploy.quantize.nested import NestedHead
from pit_deploy.quantize.nested_choice import choose_nested_head, full_time, head_time, measure, measured

ROWS, SIZE, BLOCK = 20_000, 256, 32


def problem(spread: float, positions: int = 600):
    """A table, equal probabilities, and two sets of states whose directions weigh from 1 down to 10^-spread."""
    rng = np.random.default_rng(0)
    table = np.linalg.qr(rng.standard_normal((ROWS, SIZE)))[0].astype(np.float32)
    turn = np.linalg.qr(rng.standard_normal((SIZE, SIZE)))[0]
    sizes = np.logspace(0, -spread, SIZE)
    states = [150 * rng.standard_normal((positions, SIZE)) * sizes @ turn for _ in range(2)]
    tables = SharedTable(table, rng.standard_normal((SIZE, SIZE)) * 0.1 + np.eye(SIZE), np.eye(SIZE))
    return tables, states[0].T @ states[0] / positions, states[1]


@pytest.mark.parametrize("known", [None, 12_000])
def test_measured_rates_are_those_of_the_table_in_its_basis(known):
    tables, moment, states = problem(1.5, positions=200)
    found = measure(tables, moment, states, (32, 64), (50, 200), known=known)
    for i, columns in enumerate((32, 64)):
        basis = quantization_basis(
            tables.head_map,
            tables.embedding_map,
            moment,
            row_second_moment=token_second_moment(tables.table, np.arange(ROWS)),
            leading=columns,
        )
        table, head_map, _ = apply_basis(tables.table, tables.head_map, tables.embedding_map, basis)
        table, mapped = table[:known], states @ head_map.T
        logits, estimates = mapped @ table.T, mapped[:, :columns] @ table[:, :columns].T
        order = np.argsort(-estimates, axis=1)
        for j, shortlist in enumerate((50, 200)):
            misses, kl = [], []
            for n, (exact, estimate) in enumerate(zip(logits, estimates, strict=True)):
                chosen = order[n, :shortlist]
                misses.append(exact.argmax() not in chosen)
                mixed = estimate.copy()
                mixed[chosen] = exact[chosen]
                log_p, log_q = (x - np.log(np.exp(x - x.max()).sum()) - x.max() for x in (exact, mixed))
                kl.append((np.exp(log_p) * (log_p - log_q)).sum())
            assert found.miss_rates[i, j] == pytest.approx(np.mean(misses), abs=1.5 / len(states))
            assert found.kl[i, j] == pytest.approx(np.mean(kl[::8]), rel=1e-2, abs=1e-6)
    assert (np.diff(found.miss_rates, axis=0) <= 0).all() and (np.diff(found.miss_rates, axis=1) <= 0).all()


def test_the_fastest_head_that_keeps_the_rate_is_taken():
    tables, moment, states = problem(4.0)
    head, note = choose_nested_head(tables, moment, states, bits=8, block=BLOCK, miss_rate=0.005)
    assert head is not None and head.miss_rate <= 0.005 and head.positions == len(states)
    assert f"{head.columns} of {SIZE} columns shortlist {head.shortlist}" in note
    assert head_time(ROWS, SIZE, head.columns, head.shortlist, 8, BLOCK) < full_time(ROWS, SIZE, 8)
    by_hand, _ = measured(NestedHead(head.columns, head.shortlist), tables, moment, states)
    assert by_hand == dataclasses.replace(head, kl=by_hand.kl)
    assert by_hand.kl == pytest.approx(head.kl, rel=1e-4)


def test_a_head_that_does_not_concentrate_is_kept_whole_and_the_note_says_so():
    head, note = choose_nested_head(*problem(0.0), bits=8, block=BLOCK, miss_rate=0.005)
    assert head is None
    assert note.startswith("the full head is kept: on 600 held-out positions") and "0.50% is allowed" in note


def test_a_short_text_and_a_small_vocabulary_keep_the_full_head():
    tables, moment, states = problem(4.0)
    head, note = choose_nested_head(tables, moment, states, bits=8, block=BLOCK)
    assert head is None and "600 positions" in note and "needs 4000" in note
    small = SharedTable(tables.table[:2000], tables.head_map, tables.embedding_map)
    head, note = choose_nested_head(small, moment, states, bits=8, block=BLOCK, miss_rate=0.005)
    assert head is None and "not faster at 2000 ids" in note
