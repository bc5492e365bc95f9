"""Models of two index arrays, such as matrix factorisations, with blocks of both as minibatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pymc.initial_point import make_initial_point_fn
from pymc.model import Model
from pytensor.tensor.variable import TensorVariable
from xarray import DataTree

from pymc_sgmcmc.batching import FIRST_ORDER, ShuffledWindows
from pymc_sgmcmc.checks import whole_number
from pymc_sgmcmc.errors import ModelError
from pymc_sgmcmc.gradient_estimators import GradientEstimator
from pymc_sgmcmc.machines.dealt_rows import posterior_to_deal_out
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.posterior.position import given_model
from pymc_sgmcmc.sampling.run import sample
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.sgld import SGLD


def sample_blocks(
    model: Model | None = None,
    parts: int = 4,
    *,
    step: Callable[..., StochasticGradientStep] = SGLD,
    rows: str | Sequence[str] | None = None,
    **options: Any,
) -> DataTree:
    r"""Sample a model of two index arrays with blocks of users and items as minibatches.

    In ``(U[user] * V[item]).sum(-1)`` each row of data meets one row of U and one of V. Users and
    items are each dealt out to B groups at random, and so the rows to B × B blocks. Part i consists
    of the blocks :math:`(b, (b + i) \bmod B)`, which have no user and no item in common (Ahn et al.
    2015; Şimşekli et al. 2016, section 4.3 and fig. 4). A transition draws part i with probability
    :math:`|\Omega_i| / N`, and its gradient estimate

    .. math:: \hat\nabla(\theta) = \nabla \log p(\theta)
        + \frac{N}{|\Omega_i|} \sum_{r \in \Omega_i} \nabla \log p(x_r \mid \theta)

    is unbiased. Each user moves in each transition, by the rows with one group of items.

    Parameters
    ----------
    model : pymc.Model, optional
        Two arrays of indices select entries of its variables, as in ``U[user]`` and ``V[item]``.
        Where there are more such arrays, it is the two with most values. Any other variables may
        be shared by the rows, such as a residual standard deviation and hyperparameters.
    parts : int
        B, at most the number of users and of items. With 1 a transition takes all rows.
    step : step method that takes `gradient`, or a function that makes one
        `SGLD` (which is distributed SGLD then), `PSGLD`, `HAMCMC`, `SGHMC` and others, or a
        function of ``model`` and ``gradient``.
    rows : str or sequence of str, optional
        Which data run over the rows, as of `Posterior`, where that is ambiguous.
    **options
        Arguments of `sample`, such as ``draws`` and ``client``, and settings of the step method,
        such as ``bias``, or ``step_size`` and ``preconditioner="identity"`` as in the papers.

    Returns
    -------
    xarray.DataTree
        As of `sample`.

    Raises
    ------
    TypeError, ValueError
        Where an argument cannot be used, or there are fewer users or items than parts.
    ModelError
        Where the model has no two such arrays.

    See Also
    --------
    sample : samples any model with rows, with random minibatches of all of them.

    Notes
    -----
    **Noise.** Over deals of users and items the covariance of the gradient is about that of N / B
    random rows without replacement, where few rows have both the same user and the same item.
    Computed step sizes have it. For one deal there are B gradients only, so that directions in
    which several coordinates move together have more noise than that, and others have less. So each
    chain has deals of its own, and a new one after every hundred passes over the rows.

    **Rotations.** The posterior of a matrix factorisation is the same for :math:`UQ, VQ` with any
    orthogonal Q. Means of U and V, and their R-hat, say nothing. Products ``U[i] @ V[j]`` do. Where
    all of U and V are zero the gradient is zero too, so a centre is searched from a point beside
    the initial one. Chains without a centre, as with ``step_size`` and
    ``preconditioner="identity"``, take ``initvals`` of `sample`.

    References
    ----------
    Ahn, Korattikara, Liu, Rajan and Welling (2015), Large-scale distributed Bayesian matrix
    factorization using stochastic gradient MCMC. Gemulla, Nijkamp, Haas and Sismanis (2011),
    Large-scale matrix factorization with distributed stochastic gradient descent. Şimşekli, Badeau,
    Cemgil and Richard (2016), Stochastic quasi-Newton Langevin Monte Carlo.

    Examples
    --------
    >>> import numpy as np, pymc as pm
    >>> from pymc_sgmcmc import sample_blocks
    >>> rng = np.random.default_rng(1)
    >>> user, item = rng.integers(30, size=2000), rng.integers(20, size=2000)
    >>> ratings = rng.normal(size=30)[user] + rng.normal(size=20)[item] + rng.normal(size=2000)
    >>> with pm.Model() as model:
    ...     a = pm.Normal("a", 0, 1, shape=30)
    ...     b = pm.Normal("b", 0, 1, shape=20)
    ...     _ = pm.Normal("rating", a[user] + b[item], 1.0, observed=ratings)
    >>> run = {"draws": 200, "tune": 100, "chains": 2, "cores": 1, "quiet": True}
    >>> idata = sample_blocks(
    ...     model, 2, step_size=0.01, preconditioner="identity", thin=10, random_seed=1, **run
    ... )
    >>> dict(idata["posterior"].sizes)
    {'chain': 2, 'draw': 200, 'a_dim_0': 30, 'b_dim_0': 20}
    """
    model, parts = given_model(model), whole_number("parts", parts, 1)
    if not callable(step):
        raise TypeError(
            "`step` should be the class of a step method that takes `gradient`, such as `SGLD`, or "
            f"a function that makes one, but got {step!r}."
        )
    if "gradient" in options:
        raise TypeError(
            "`sample_blocks` has a gradient of its own, that of a part. Leave `gradient` out, or "
            "use `sample`."
        )
    continuous = {variable for variable in model.free_RVs if variable.dtype.startswith("float")}
    point = make_initial_point_fn(model=model, jitter_rvs=continuous)(FIRST_ORDER)
    posterior = posterior_to_deal_out(
        model, rows, by="sample_blocks", to="parts", initial_point=point
    )
    scheme = Parts(posterior.data, two_index_arrays(posterior), parts)
    of_run = {name: options.pop(name) for name in signature(sample).parameters if name in options}
    make = partial(step, gradient=PartGradient(posterior, scheme), **options)
    return sample(step=make, model=model, **{"marginalize": None, **of_run})


def two_index_arrays(posterior: Posterior) -> list[np.ndarray]:
    """The two arrays with most values of those by which rows select entries of variables.

    Raises
    ------
    ModelError
        Where there are no two.
    """
    reading, (_, rows, _) = posterior.reading, posterior.terms_of_rows
    selecting = dict.fromkeys(
        reading.vectors[index]
        for each in reading.indexings
        if each.of & reading.values
        for index in each.indices.values()
        if index in reading.vectors
    )
    found: list[np.ndarray] = []
    for index in posterior.compile_for_setup(rows, list(selecting))(*posterior.data):
        codes = np.unique(index, return_inverse=True)[1]
        if not any(np.array_equal(codes, other) for other in found):
            found.append(codes)
    if len(found) < 2:
        raise ModelError(
            "`sample_blocks` needs variables whose entries two arrays select, as in "
            f"`U[user] * V[item]`, but the model has {len(found)} such array"
            f"{'' if found else 's'}. Use `sample`, which takes any model with rows."
        )
    return sorted(found, key=np.max, reverse=True)[:2]


class Parts(ShuffledWindows):
    """All rows of one part of a grid of users and items, with probability |Ω_i| / N.

    The part is that of a uniform row. The order of the rows is by their part, and another order is
    another deal of users and items to groups.

    Parameters
    ----------
    data : sequence of numpy.ndarray
    codes : sequence of two numpy.ndarray
        User and item of each row, counted from 0 without gaps.
    parts : int
        B.

    Raises
    ------
    ValueError
        Where there are fewer users or items than parts.
    """

    name = "parts"
    _edges: np.ndarray
    """Places of the first rows of the parts in the present order, and the number of rows."""

    def __init__(self, data: Sequence[np.ndarray], codes: Sequence[np.ndarray], parts: int):
        self._codes, self._parts = codes, parts
        self._counts = [np.bincount(each) for each in codes]
        fewest = min(map(len, self._counts))
        if fewest < parts:
            raise ValueError(
                f"`parts={parts}` needs as many groups of users and items, but an array of indices "
                f"has {fewest} values. Take fewer parts."
            )
        super().__init__(data, max(1, round(len(codes[0]) / parts)))

    def setting(self, batch_size: int) -> str:
        """The number of parts with about so many rows."""
        return f"parts={max(1, self.n_rows // batch_size)}"

    def index_variable(self, name: str) -> TensorVariable:
        """First rows and numbers of rows, shape (minibatches, 2)."""
        return pt.lmatrix(name)

    @property
    def index_size(self) -> int:
        """First row and number of rows."""
        return 2

    def rows(self, index: TensorVariable) -> list[TensorVariable]:
        """All rows of a part."""
        return [shared[index[0] : index[0] + index[1]] for shared in self._shared]

    def in_memory(self, index: np.ndarray, rng: np.random.Generator, following: int) -> np.ndarray:
        """First rows and numbers of rows of the parts in which rows are, in the present order."""
        part = np.searchsorted(self._edges, index, side="right") - 1
        return np.stack([self._edges[part], np.diff(self._edges)[part]], axis=-1)

    def _places(self, start: int) -> np.ndarray:
        part = np.searchsorted(self._edges, start, side="right")
        return np.arange(self._edges[part - 1], self._edges[part])

    def _permutation(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng([self.n_rows, seed])
        users, items = (
            dealt_out(counts, self._parts, rng)[codes]
            for counts, codes in zip(self._counts, self._codes, strict=True)
        )
        part = (items - users) % self._parts
        self._edges = np.cumsum([0, *np.bincount(part, minlength=self._parts)])
        return np.argsort(part, kind="stable")

    def _padding(self) -> int:
        return 0


class PartGradient(GradientEstimator):
    """The gradient of the rows of a part, scaled to all rows, see `sample_blocks`."""

    name = "plain"
    with_less_noise = "`sample`, whose control variates reduce the noise"

    def __call__(self, position: TensorVariable, index: TensorVariable) -> TensorVariable:
        """Gradient estimate, shape (d,)."""
        posterior, batching = self.posterior, self.batching
        likelihood = posterior.rows_gradient(
            posterior.of_rows(position), batching.rows(index), index[1]
        )
        scale = (batching.n_rows_variable / index[1]).astype(posterior.dtype)
        return posterior.gradient_with_prior(position, scale * likelihood)


def dealt_out(counts: np.ndarray, parts: int, rng: np.random.Generator) -> np.ndarray:
    """A random group of each user or item, with about as many of them, and of their rows, in each.

    Each of the B with the most rows goes to another group, at random, then each of the next B, and
    so on.
    """
    order = rng.permutation(len(counts))
    order = order[np.argsort(-counts[order], kind="stable")]
    rounds = -(-len(counts) // parts)
    groups = rng.permuted(np.tile(np.arange(parts), (rounds, 1)), axis=1).ravel()
    result = np.empty(len(counts), dtype=np.int64)
    # Those of the last, incomplete round go to different groups too.
    result[order] = groups[: len(counts)]
    return result
