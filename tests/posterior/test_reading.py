"""One reading of a graph: what depends on what, what is indexed by what, and where rows lie."""

from __future__ import annotations

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from pymc_sgmcmc.posterior.agreement import agree, is_sum
from pymc_sgmcmc.posterior.reading import Reading, axes_of_length, before_casts
from pymc_sgmcmc.posterior.rows import keep_whole

EPSILON = np.finfo(float).eps


@pytest.fixture
def graph():
    """Effects of users and items, and a mean, with an array of codes for each of both."""
    effect, table, mean = pt.vector("effect"), pt.matrix("table"), pt.scalar("mean")
    user, pair = pt.vector("user", dtype="int32"), pt.matrix("pair", dtype="int64")
    of_user = (effect * effect.shape[0])[user.astype("int64") - 1]
    of_item = (mean + table)[pair[:, 0], pair[:, 1]]
    return (effect, table, mean), (user, pair), (of_user, of_item)


def test_variables_depend_on_values_and_rows(graph):
    (effect, table, mean), (user, pair), (of_user, of_item) = graph
    reading = Reading([of_user + of_item], (effect, table, mean), (user, pair))
    assert reading.of([of_user]) == {effect, user}
    assert reading.of([of_item]) == {table, mean, pair}
    assert reading.of([pt.zeros(3)]) == frozenset()
    lengths = Reading([effect.shape[0], user.shape[0]], [effect], [user])
    assert [lengths.of([each]) for each in (effect.shape[0], user.shape[0])] == [set(), set()]
    first, second = effect.shape[0] * 1, user.shape[0] * 1
    lengths = Reading([first, second], [effect], [user])
    assert (lengths.of([first]), lengths.of([second])) == (set(), {user})


def test_a_root_that_is_made_of_others_is_a_root():
    x = pt.vector("x")
    made, other = x + 1, x * 2
    reading = Reading([made * other], [x, made])
    assert reading.of([made]) == {made}
    assert reading.of([other]) == {x}


def test_entries_of_groups_belong_to_records_after_they_are_selected(graph):
    (effect, table, mean), rows, (of_user, of_item) = graph
    again = of_user[pt.arange(3)] + of_item
    for through, expected in ((True, 3), (False, 2)):
        reading = Reading([again], (effect, table, mean), rows, through=through)
        assert len(reading.indexings) == 3
        assert len(reading.dependent) == expected
        assert bool(reading.of([again]) & reading.values) == through


def test_indexings(graph):
    values, rows, (of_user, of_item) = graph
    found = {each.result: each for each in Reading([of_user, of_item], values, rows).indexings}
    alone, together = found[of_user], found[of_item]
    assert (alone.axis, alone.together) == (0, ())
    assert together.of == {*values[1:]}
    assert list(together.indices) == [0, 1]
    assert together.together == tuple(together.indices.values())
    (third,) = Reading([pt.tensor3("x")[:, rows[0], 0]], ()).indexings
    assert (third.axis, third.index, third.together) == (1, rows[0], ())
    assert Reading([values[0][pt.vector("mask", dtype="bool")]], values).dependent == []


def test_vectors_with_a_number_for_each_row(graph):
    values, (user, pair), (of_user, of_item) = graph
    vectors = Reading([of_user + of_item], values, (user, pair)).vectors
    (index,) = (each.index for each in Reading([of_user], values).dependent)
    assert vectors[index] is index  # with one subtracted
    assert vectors[index.owner.inputs[0]] is user  # before the cast
    assert sum(each.owner is not None and each.owner.inputs[0] is pair for each in vectors) == 2
    total = user + user.sum()  # It depends on all rows.
    assert total not in Reading([total], values, [user]).vectors
    length = user - user.shape[0]
    assert length not in Reading([length], values, [user]).vectors
    assert before_casts(user.astype("int64").astype("float64")) is user


def test_axes_of_data():
    leading, trailing = pytensor.shared(np.zeros((7, 2))), pytensor.shared(np.zeros((2, 7)))
    whole, entry = keep_whole(np.zeros(7), "whole"), pytensor.shared(np.zeros(7))
    graph = (leading + trailing.T).sum() + whole.sum() + entry[3] + np.zeros(5).sum()
    assert axes_of_length(graph, 7) == {leading: 0, trailing: 1}
    assert axes_of_length(graph, 7, [leading]) == {trailing: 1}
    made = leading * 2
    assert axes_of_length(made.sum() + trailing.sum(), 7, [made]) == {trailing: 1}


def test_agreement_up_to_rounding():
    whole = np.array([1.0, np.nan, -np.inf])
    assert agree(whole, whole, 1.0, 0.0)
    assert not agree(whole, whole, 1.0, 0.0, finite=True)
    assert not agree(whole[:2], whole, 1.0, 1.0)
    assert not agree(np.array([1.0, np.nan, np.inf]), whole, 1.0, 1.0)
    assert not agree(np.array([1.0, 0.0, -np.inf]), whole, 1.0, 1.0)
    for factor, expected in ((0.9, True), (1.1, False)):
        assert agree(whole + np.array([factor * 1e-3, 0, 0]), whole, 2.0, 5e-4) == expected


def test_sums_up_to_the_rounding_of_their_largest_part():
    large = 1e10
    parts = np.array([[large, 1.0], [-large, 2.0]])
    slack = 20 * np.sqrt(EPSILON) + 1e4 * EPSILON * large
    assert is_sum(parts, np.array([0.9 * slack, 3.0]), float)
    assert not is_sum(parts, np.array([1.1 * slack, 3.0]), float)
    assert is_sum(parts, np.array([1.1 * slack, 3.0]), "float32")
    alone = parts.sum(0)[None]
    assert not is_sum(alone, np.array([0.9 * slack, 3.0]), float)
    assert is_sum(alone, np.array([0.9 * slack, 3.0]), float, parts)
