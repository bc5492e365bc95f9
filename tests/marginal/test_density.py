"""Log densities of groups against PyMC's, against brute force, and their derivatives."""

from __future__ import annotations

import itertools

import numpy as np
import pymc as pm
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import toposort
from pytensor.scalar.basic import Switch
from pytensor.scalar.math import Sigmoid, Softplus
from pytensor.scan.op import Scan
from pytensor.tensor.elemwise import Elemwise

from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_quietly
from pymc_sgmcmc.marginal import marginalize
from pymc_sgmcmc.marginal.check import checked_density, random_point
from pymc_sgmcmc.marginal.exact import exact
from pymc_sgmcmc.marginal.newton import find_mode
from pymc_sgmcmc.marginal.quadrature import laplace, quadrature
from pymc_sgmcmc.marginal.structure import find_structure
from pymc_sgmcmc.posterior import Posterior
from tests.marginal.models import (
    ALL,
    N_GROUPS,
    ONE_QUANTITY,
)

# Newton's method in a graph is a scan, whose inner function is compiled too.
pytestmark = pytest.mark.usefixtures("without_compiler")


class Case:
    """The density of a model, evaluated at its global variables' random values."""

    def __init__(self, build):
        self.model, names = build(np.random.default_rng(3))
        self.density = checked_density(self.model, find_structure(self.model, names))
        self.numbers = np.arange(N_GROUPS)
        point, inputs = random_point(self.model), self.model.value_vars
        parameters = [self.model[name] for name in self.density.parameters]
        function = compile_quietly(
            inputs, self.model.replace_rvs_by_values(parameters), PYTHON_MODE
        )
        self.values = function(*(point[value.name] for value in inputs))

    def function(self, graphs):
        """Function of the parameters, and a block of each group where the graphs have one."""
        compiled = compile_quietly(
            [self.density.block, self.density.numbers, *self.density.parameters.values()],
            graphs,
            PYTHON_MODE,
        )
        zeros = np.zeros((N_GROUPS, self.density.block_size))
        return lambda values, block=zeros: compiled(block, self.numbers, *values)

    def evaluate(self, graphs, **block):
        """Values of graphs at the parameters."""
        return self.function(graphs)(self.values, **block)

    def gradients(self, graph):
        """Gradients of the sum over groups by the parameters."""
        parameters = list(self.density.parameters.values())
        return self.evaluate(pt.grad(graph.sum(), parameters, disconnected_inputs="ignore"))

    def differences(self, graph, width=1e-5):
        """The same by central differences."""
        total, gradients = self.function([graph.sum()]), []
        for place, value in enumerate(self.values):
            gradient = np.empty(np.shape(value))
            for index in np.ndindex(np.shape(value)):
                at = []
                for sign in (-1, 1):
                    moved = np.array(value)
                    moved[index] += sign * width
                    values = [*self.values[:place], moved, *self.values[place + 1 :]]
                    at.append(float(total(values)[0]))
                gradient[index] = (at[1] - at[0]) / (2 * width)
            gradients.append(gradient)
        return gradients


def brute_force(case: Case) -> np.ndarray:
    """Log density of each group by sums over a wide and fine grid around the mode.

    The sum over an evenly spaced grid of a smooth function that falls to zero at both ends has an
    error that falls faster than any power of the distance between the points.
    """
    mode = find_mode(case.density)
    size = case.density.block_size
    block, *entries = case.evaluate([mode.block, *(entry for row in mode.root for entry in row)])
    root = np.zeros((N_GROUPS, size, size))
    places = [(row, column) for row in range(size) for column in range(row + 1)]
    for (row, column), entry in zip(places, entries, strict=True):
        root[:, row, column] = entry
    scales = np.linalg.inv(np.swapaxes(root, 1, 2))
    width, reach = (0.02, 60.0) if size == 1 else (0.15, 25.0)
    axis = np.sinh(np.arange(-np.arcsinh(reach), np.arcsinh(reach), width))
    weights = np.sqrt(1 + axis**2) * width
    grid = np.array(list(itertools.product(axis, repeat=size)))
    log_weights = sum(np.log(np.array(list(itertools.product(weights, repeat=size)))).T)
    points = block[None] + np.einsum("gij,kj->kgi", scales, grid)
    placeholder = pt.tensor3("points")
    values_at = compile_quietly(
        [placeholder, case.density.numbers, *case.density.parameters.values()],
        case.density.at_points(placeholder),
        PYTHON_MODE,
    )
    values = np.concatenate(
        [values_at(piece, case.numbers, *case.values) for piece in np.array_split(points, 40)]
    )
    values = values + log_weights[:, None] + np.log(np.abs(np.linalg.det(scales)))
    return np.logaddexp.reduce(values, axis=0)


@pytest.mark.parametrize("name", ALL)
def test_many_nodes_give_the_integral(name):
    case = Case(ALL[name])
    points = 61 if name in ONE_QUANTITY else 35
    (values,) = case.evaluate([quadrature(case.density, points)])
    # The tails of a Student law are no polynomial times a normal law.
    tolerance = 2e-4 if name == "Student" else 1e-8
    np.testing.assert_allclose(values, brute_force(case), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["linear", "linear slopes"])
def test_exact_integration(name):
    case = Case(ALL[name])
    (values,) = case.evaluate([exact(case.density)])
    np.testing.assert_allclose(values, brute_force(case), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("points", [1, 25])
def test_gradients(name, points):
    """Laplace's method has the gradient of its value, and 25 nodes have it to rounding."""
    case = Case(ALL[name])
    graph = laplace(case.density) if points == 1 else quadrature(case.density, points)
    tolerance = 2e-3 if name == "Student" and points > 1 else 1e-6
    for gradient, difference in zip(case.gradients(graph), case.differences(graph), strict=True):
        np.testing.assert_allclose(gradient, difference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "name", ["logistic", pytest.param("logistic slopes", marks=pytest.mark.slow)]
)
def test_the_error_falls_with_the_nodes(name):
    """Fourfold and more for two more nodes, and the gradient's as fast in all."""
    case = Case(ALL[name])
    reference = quadrature(case.density, 31)
    (exact_value,), exact_gradient = case.evaluate([reference]), case.gradients(reference)
    errors, gradient_errors = [], []
    for points in (3, 5, 7, 9):
        graph = quadrature(case.density, points)
        errors.append(np.abs(case.evaluate([graph])[0] - exact_value).max())
        gradient_errors.append(
            max(
                np.abs(one - other).max()
                for one, other in zip(case.gradients(graph), exact_gradient, strict=True)
            )
        )
    assert all(later < earlier / 4 for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 1e-5
    # Its sign may change, so single errors are small by chance.
    assert gradient_errors[-1] < gradient_errors[0] / 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "logistic, unequal groups",
        "two outcomes",
        "independent linear slopes",
        pytest.param("logistic slopes", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_single_groups(name):
    """Rows of a posterior: each alone, their sum, and that of PyMC's own log density."""
    model, names = ALL[name](np.random.default_rng(3))
    groups = marginalize(model, names)
    posterior = Posterior(groups)
    assert posterior.n_rows == N_GROUPS
    position = 0.3 * np.random.default_rng(4).normal(size=posterior.dimension)
    rows = posterior.take(slice(None))
    apart = posterior.row_gradients(position, rows)
    for number in (0, 5, N_GROUPS - 1):
        alone = posterior.likelihood_gradient(position, posterior.take([number]))
        np.testing.assert_allclose(apart[number], alone, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(apart.sum(axis=0), posterior.likelihood_gradient(position))
    total = groups.compile_dlogp(mode=PYTHON_MODE)(posterior.layout.unravel(position))
    np.testing.assert_allclose(posterior.gradient(position), total, rtol=1e-9)


def test_the_mode_is_found_from_far_away():
    """Counts of many thousands where the prior expects one."""

    def counts(rng):
        group = np.repeat(np.arange(N_GROUPS), 3)
        with pm.Model() as model:
            sd = pm.HalfNormal("sd", 1)
            z = pm.Normal("z", 0, sd, shape=N_GROUPS)
            observed = rng.poisson(np.repeat(10.0 ** np.arange(-6, 6), 3))
            pm.Poisson("y", pm.math.exp(5 * z[group]), observed=observed)
        return model, ["z"]

    case = Case(counts)
    mode = find_mode(case.density).block
    for value in (0.01, 0.3, 3.0):
        case.values = [np.array(value)]
        (block,) = case.evaluate([mode])
        slopes = case.evaluate(case.density.gradient, block=block)
        assert np.abs(slopes).max() < 1e-3


def scalar_operations(nodes):
    return [type(node.op.scalar_op) for node in nodes if isinstance(node.op, Elemwise)]


@pytest.mark.parametrize("equal", [True, False])
def test_value_and_gradient_share_a_search_and_check_no_support(equal, rng):
    """Equal parts of both are computed once, and no support that all records are in is checked."""
    counts = np.full(20, 4) if equal else np.arange(20) + 1
    codes = np.repeat(np.arange(20), counts)
    with pm.Model() as model:
        mean, z = pm.Normal("mean"), pm.Normal("z", shape=20)
        x = rng.normal(size=len(codes))
        pm.Bernoulli("y", logit_p=mean * x + z[codes], observed=codes % 2)
    posterior = Posterior(marginalize(model, "z"))
    nodes = posterior._log_likelihood_function.function.maker.fgraph.apply_nodes
    (search,) = [node for node in nodes if isinstance(node.op, Scan)]
    inside = scalar_operations(search.op.fn.maker.fgraph.apply_nodes)
    assert inside.count(Softplus) == inside.count(Sigmoid) == 1
    density = checked_density(model, find_structure(model, ["z"]))
    switches = [
        node
        for node in toposort([piece.values for piece in density._pieces])
        if isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, Switch)
    ]
    assert len(switches) == 1  # that of the outcome


def test_a_support_that_a_record_is_outside_of_is_checked():
    codes, y = np.repeat(np.arange(5), 4), np.tile([1.0, 2.0, 3.0, 0.5], 5)
    y[7] = -1.0
    with pm.Model() as model:
        z = pm.Normal("z", shape=5)
        pm.Exponential("y", lam=pm.math.exp(pm.Normal("mean") + z[codes]), observed=y)
    density = checked_density(model, find_structure(model, ["z"]))
    parameters = list(density.parameters.values())
    function = compile_quietly(
        [density.block, density.numbers, *parameters], density.value, PYTHON_MODE
    )
    values = function(np.zeros((5, 1)), np.arange(5), *(np.zeros(()) for _ in parameters))
    np.testing.assert_array_equal(np.isfinite(values), np.arange(5) != 1)
