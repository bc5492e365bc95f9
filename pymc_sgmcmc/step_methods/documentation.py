"""Parameters that all step methods share, for their docstrings."""

from __future__ import annotations

import inspect
import re

COMMON_PARAMETERS = r"""
vars : sequence of variables, optional
    Continuous free variables, in any order; all of the model where not given.
preconditioner : {"curvature", "identity"}, float, (d,) or (d, d) array, optional
    M, symmetric positive definite, fixed. "curvature" is the inverse curvature at the
    centre: dense up to d = 500, a diagonal with up to 50 directions up to d = 20 000, and
    diagonal beyond. Default: "curvature" where the step size is computed, "identity" where
    it is given.
step_size : float or callable, optional
    h, or a function of the transition number (from 0) such as `PolynomialDecay`. Where
    not given, the closed form :math:`h = 4\delta / (\lambda_{\max}(MV) +
    \lambda_{\max}(MH))` for the variance inflation :math:`\delta` stated as `bias`, set anew
    while tuning from the gradients along the chain.
bias : float, optional
    Relative error of the posterior variance that you accept, in (0, 1), instead of a
    `step_size`; 0.05 where neither is given. `bias_report` estimates the error of a run.
gradient : {"plain", "cv", "svrg", "saga"}, SVRG or GradientEstimator
    Estimator of the gradient: the scaled minibatch gradient; that of Baker et al. with
    control variates at the centre; with control variates at an earlier position of the chain
    (`SVRG` sets how often it is refreshed); or with a stored gradient for each row. An
    estimator made by hand brings its own posterior and minibatch scheme.
batch_size : int, optional
    Rows n a minibatch; for a model with `pymc.Minibatch` it replaces the model's own. Default
    for an ordinary model: the batch size at which an effective draw costs least, see
    `pymc_sgmcmc.tuning.choose_batch_size`.
batching : {"shuffle", "replace"}
    Windows of rows in random order (without replacement; the default), or independent rows
    with replacement (the default of ``gradient="saga"``, see `SAGAGradient`).
rows : str or sequence of str, optional
    Names of observed variables, `pymc.Data` variables or a dimension that run over the
    rows, for ordinary models in which this is ambiguous.
center : {"lbfgs", "sgd"}, mapping or (d,) array, optional
    How to find the point near the mode at which curvature, control variates and the
    start of the chains lie: by L-BFGS on gradients of all rows (default), by one pass of
    stochastic Newton steps, or the point itself: values of all variables by name, or the
    unconstrained position. Not computed where nothing needs it.
init : mapping, xarray.DataTree or pymc Approximation, optional
    An approximation of the posterior to take the centre and the curvature from, in place of a
    search: draws of all free variables, as Pathfinder in `pymc_extras` or a short run of NUTS
    return them; what `pymc.fit` returns; or ``{"mean": (d,), "covariance": (d, d)}`` of the
    unconstrained position.
thin : int, optional
    Transitions a recorded draw. Default: one relaxation time, at most 1000, where the
    step size is computed, and 1 where it is given.
tune_method : {"closed_form", "halving"}
    Where `step_size` is not given: the closed form, or, where that does not apply, successive
    halving of a grid of step sizes by the kernel Stein discrepancy of short chains (Coullon,
    South and Nemeth 2021), which trades bias for mixing on its own.
model : pymc.Model, optional
initial_point : mapping, optional
    Values of all value variables, as PyMC passes them.
compile_kwargs : dict, optional
    For the transitions, passed to `pytensor.function`: ``{"mode": "NUMBA"}`` (the
    default), ``"CVM"`` or ``"JAX"``.
blocked : bool
    Sample the variables together, which is the only sensible choice for these samplers.
rng : optional
    Seed or generator for use outside `pymc.sample`.
"""
"""These are entries of a numpydoc section. A step method that gives a parameter another meaning has
an entry of its own."""

_ENTRY = re.compile(r"^(\w+) : .*\n(?:    .*\n|\n(?=    ))*", re.MULTILINE)
_SECTION = re.compile(r"^(?:Raises|Warns|Notes|References|Examples)\n-+\n", re.MULTILINE)
_PARAMETERS = re.compile(r"^Parameters\n-+\n", re.MULTILINE)


def documented[Class: type](cls: Class) -> Class:
    """Give the docstring of a step method an entry for each argument of its signature."""
    if cls.__doc__ is None:  # left out by `python -OO`
        return cls
    doc = inspect.cleandoc(cls.__doc__) + "\n"
    section = _SECTION.search(doc)
    end = len(doc) if section is None else section.start()
    parameters = _PARAMETERS.search(doc, 0, end)
    start = end if parameters is None else parameters.start()
    own = _entries(doc[start:end])
    common = _entries(COMMON_PARAMETERS)
    names = [name for name in inspect.signature(cls).parameters if name in own or name in common]
    entries = "".join(own.get(name, common.get(name, "")) for name in names)
    cls.__doc__ = f"{doc[:start]}Parameters\n----------\n{entries}\n{doc[end:]}"
    return cls


def _entries(section: str) -> dict[str, str]:
    """Entries of a section by the name of the parameter."""
    return {match[1]: match[0].rstrip() + "\n" for match in _ENTRY.finditer(section)}
