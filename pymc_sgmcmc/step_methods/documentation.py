"""Parameters that all step methods share, for their docstrings."""

from __future__ import annotations

import inspect
import re

COMMON_PARAMETERS = r"""
vars : sequence of variables, optional
    Continuous free variables, in any order. Default: all of the model.
preconditioner : {"curvature", "identity"}, float, (d,) or (d, d) array, optional
    The fixed matrix M, symmetric positive definite. "curvature" is the inverse curvature at the
    centre: dense up to d = 500, a diagonal with up to 50 directions up to d = 20 000, and
    diagonal beyond. Default: "curvature". It is needed where `step_size` is given, whose units
    depend on it.
step_size : float or callable, optional
    The step size h, or a function of the transition number (from 0) such as `PolynomialDecay`.
    Default: the closed form :math:`h = 4\delta / (\lambda_{\max}(MV) + \lambda_{\max}(MH))` for
    the variance inflation :math:`\delta` given as `bias`. It is computed anew during tuning from
    the gradients along the chain.
bias : float, optional
    Relative error of the posterior variance that you accept, in (0, 1), instead of a
    `step_size`. Default: 0.05. `bias_report` estimates the error of a run.
gradient : {"plain", "cv", "svrg", "saga"}, SVRG or GradientEstimator
    Estimator of the gradient. "plain" is the scaled minibatch gradient. "cv" has control variates
    at the centre (Baker et al.), and "svrg" at an earlier position of the chain (`SVRG` sets how
    often it is refreshed). "saga" stores a gradient for each row. An estimator made by hand has
    its own posterior and minibatch scheme. The default is "plain" for `SGLD`, `SGRLD`, `OSGFS`
    and `Recipe`, and "cv" for the others: plain gradients take many more transitions.
batch_size : int, optional
    Number n of rows in a minibatch. For a model with `pymc.Minibatch` it replaces the model's
    own. Default for an ordinary model: the batch size at which an effective draw costs least, see
    `pymc_sgmcmc.tuning.choose_batch_size`.
batching : {"shuffle", "replace"}
    Windows of rows in random order (without replacement; the default), or independent rows
    with replacement (the default of ``gradient="saga"``, see `SAGAGradient`).
row_weights : (N,) array, optional
    Positive numbers in proportion to the probabilities p with which rows are drawn, with
    replacement; their gradients are divided by N p, so that the estimate stays unbiased (Baker et
    al. 2019, §3.1). `step_size` and `batch_size` have to be given. `SGLDCV` evaluates the rows that
    cause most noise in each transition where it computes the batch size, which needs no weights.
rows : str, sequence of str or RowSource, optional
    Names of observed variables, `pymc.Data` variables or a dimension that run over the
    rows, for ordinary models in which this is ambiguous. Or the source of rows that do not fit in
    memory, as `open_rows` returns it, where the model is written on what its `head` returns.
center : {"lbfgs", "sgd"}, mapping or (d,) array, optional
    The point near the mode for curvature, control variates and the start of the chains, or how to
    search it. "lbfgs" (default) uses gradients of all rows, "sgd" one pass of stochastic Newton
    steps. The point itself is a mapping from all names to values, or the unconstrained position.
    It is not computed where nothing needs it.
init : mapping, xarray.DataTree or pymc Approximation, optional
    An approximation of the posterior that gives the centre and the curvature, in place of a
    search: draws of all free variables, as Pathfinder in `pymc_extras` or a short run of NUTS
    return them; the approximation that `pymc.fit` returns; or
    ``{"mean": (d,), "covariance": (d, d)}`` of the unconstrained position.
local : str, variable, sequence of these, or LocalSampling, optional
    Free variables with entries for groups that the gradient estimator samples itself, by Fisher's
    identity. The rows are then the groups, and the chain moves the other variables. See
    `LocalSampling`, and `marginalize` for up to three quantities a group.
thin : int, optional
    Number of transitions for each recorded draw. Default: one relaxation time of the slowest
    direction, at most 1000, where the step size is computed, and 1 where it is given. Where tuning
    changes the step size of Langevin dynamics, the default follows it at the end of tuning, by
    powers of two up to 16.
tune_method : {"closed_form", "halving"}
    How a step size is computed: in closed form, or, where that does not apply, by successive
    halving of a grid of step sizes. Halving compares short chains by their kernel Stein
    discrepancy (Coullon, South and Nemeth 2021) and has no stated accuracy.
positive : {"transform", "mirror"}
    How positive variables stay positive: by the transform that PyMC gives them, or, where the model
    has them without one (``default_transform=None``), by taking absolute values after each
    transition (Şimşekli et al. 2016). The law is then the posterior on the positive side up to
    O(h). The gradient of the log density has to be bounded at zero, as with `pm.Exponential`; other
    models are refused. All settings have to be given, since the mode may be at zero; tools that
    need the mean of the gradients to be zero refuse the trace.
model : pymc.Model, optional
initial_point : mapping, optional
    Values of all value variables, as PyMC passes them.
compile_kwargs : dict, optional
    Arguments of `pytensor.function` for the transitions, such as the mode: ``{"mode": "NUMBA"}``
    (the default), ``"CVM"`` or ``"JAX"``.
blocked : bool
    Whether to sample the variables together, which is the only sensible choice here.
rng : optional
    Seed or generator for use outside `pymc.sample`.
"""
"""These are entries of a numpydoc section. A step method that gives a parameter another meaning has
its own entry for it."""

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
