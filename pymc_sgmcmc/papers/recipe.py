"""The complete recipe as a step method: samplers that are made from two matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import numpy as np
import pytensor.tensor as pt
from scipy import linalg

from pymc_sgmcmc.checks import FEW_NAMES, accepts
from pymc_sgmcmc.compiling.compiled import PYTHON_MODE, compile_quietly
from pymc_sgmcmc.dynamics.blocks import assemble
from pymc_sgmcmc.dynamics.recipe import GaussianAuxiliary, RecipeDynamics
from pymc_sgmcmc.matrices import SINGULAR, Dense, Diagonal, Matrix, as_matrix, dependent_coordinates
from pymc_sgmcmc.posterior import Posterior
from pymc_sgmcmc.schedules import step_sizes
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.estimators import Gradient
from pymc_sgmcmc.step_methods.momentum import check_noise, rows_noise
from pymc_sgmcmc.step_methods.settings import CommonSettings
from pymc_sgmcmc.step_methods.setup import Design, Kind, Pace, Setup, default_thinning
from pymc_sgmcmc.tuning import Center

CHECKED_POINTS = 5
"""D and Q are checked at this many random states before sampling. A matrix that is wrong everywhere
fails at each of them, and more states would take more time."""

LARGEST_LINEAR_STATE = 400
"""A step size is computed for states of at most this many coordinates. Each step size that is tried
needs the solution of a Lyapunov equation of that size."""

SINGLE_SINGULAR = 1e-6
"""In single precision an eigenvalue of a correlation matrix counts as zero up to this size, in
place of `SINGULAR`. It is about ten times the relative rounding error of single precision."""


class Recipe(StochasticGradientStep):
    r"""A sampler of your own, from a diffusion matrix D and a curl matrix Q.

    .. math::
        z' = z + \tfrac{h}{2} \left\{ [D(z) + Q(z)] \hat\nabla \log p(z) + \Gamma(z) \right\}
              + N\!\left(0,\; h D(z) - \tfrac{h^2}{4} (D + Q) \hat V (D + Q)^\top \right), \qquad
        \Gamma_i = \sum_j \partial_j (D_{ij} + Q_{ij})

    This is the complete recipe of Ma, Chen and Fox (2015). In the limit of small steps, each
    continuous Markov process with the law p has this form, with D positive semi-definite and Q
    skew-symmetric. The state z is the position and Gaussian auxiliaries r, with
    :math:`\log p(z) = \log \pi(\theta) + \sum \log N(r; \text{mean}, \text{variance})`.
    :math:`\Gamma` is computed by automatic differentiation.

    **Law.** For each valid D and Q the law tends to the posterior as h goes to zero. For h > 0
    there is a bias of first order in h. It comes from the Euler step, and from the gradient noise
    of covariance V through :math:`\tfrac{h^2}{4} (D+Q) V (D+Q)^\top`, as far as `gradient_noise`
    does not remove it. The time step is h / 2: ``D=M`` is `SGLD` with the preconditioner M and the
    same h.

    **Cost.** A transition takes one gradient of n rows, and D and Q. Blocks that depend on z are
    differentiated in each direction of the part of z that belongs to their columns. That costs
    about as much as evaluating them as many times; constant blocks cost nothing. A dense D needs a
    Cholesky root each time.

    Parameters
    ----------
    D : callable
        The diffusion matrix: a function of the symbolic position and auxiliaries, in the order
        of `auxiliaries`. It gives rows of blocks, one for each pair of parts of the state: 0
        for zero, a number for a multiple of the identity, a vector for a diagonal, or a matrix.
        It may also give the whole matrix as a number, a vector or a matrix.
    Q : callable, optional
        The curl matrix, in the same form. Default: zero.
    auxiliaries : sequence of str or GaussianAuxiliary
        A name stands for a vector as long as the position that is standard normal in the target.
        A `GaussianAuxiliary` has its own size, mean and variance.
    gradient_noise : "center" or (d,) or (d, d) array, optional
        Estimate :math:`\hat V` of the covariance of the gradient estimate, which is subtracted
        from the noise. "center" computes it at the centre. Nothing is subtracted where it is not
        given.
    step_size : float or callable, optional
        The step size h. Default: the largest at which the process linearised at the centre has
        stationary variances that are too large by at most `bias` in each direction. The process
        has the curvature at the centre and the noise of the gradient there.

    Raises
    ------
    TypeError
        Where D or Q is no function of the parts of the state.
    ValueError
        Where the shapes of blocks are wrong; where, at random states, D is not symmetric or not
        positive semi-definite, Q is not skew-symmetric, or neither moves some part of the position;
        where `gradient_noise` leaves too little noise; where no step size can be computed;
        otherwise as `SGLD`.

    Notes
    -----
    El hanchi (2018, eq. 5) prints the covariance that the gradient noise adds without the
    transpose. In the step that Ma et al. print (section 2), and in lecture notes after them,
    :math:`\Gamma` is subtracted; it must be added.

    References
    ----------
    Y.-A. Ma, T. Chen and E. B. Fox (2015). A complete recipe for stochastic gradient MCMC.
    *NeurIPS*.

    Examples
    --------
    SGHMC in the Euler form has four blocks in each matrix, with friction on the momentum in D and a
    symplectic Q:

    >>> import numpy as np, pymc as pm
    >>> rng = np.random.default_rng(1)
    >>> x = rng.normal(size=1000)
    >>> with pm.Model():
    ...     slope = pm.Normal("slope", 0, 10)
    ...     _ = pm.Normal("y", slope * x, 1.0, observed=2 * x + rng.normal(size=1000))
    ...     sghmc = Recipe(
    ...         D=lambda theta, r: [[0, 0], [0, 50.0]],
    ...         Q=lambda theta, r: [[0, -1], [1, 0]],
    ...         auxiliaries=["momentum"],
    ...         batch_size=1000,
    ...         compile_kwargs={"mode": "FAST_COMPILE"},
    ...     )
    ...     idata = pm.sample(
    ...         step=sghmc,
    ...         draws=200,
    ...         tune=0,
    ...         chains=1,
    ...         random_seed=1,
    ...         progressbar=False,
    ...         quiet=True,
    ...     )
    >>> bool(abs(idata.posterior["slope"].mean() - 2) < 0.1)
    True

    With a metric G that depends on the position this becomes stochastic gradient Riemannian HMC.
    Here ``root`` is :math:`G^{-1/2}`:

    >>> def D(theta, r):
    ...     root = 1 / (1 + theta**2)
    ...     return [[0, 0], [0, root**2]]
    >>> def Q(theta, r):
    ...     root = 1 / (1 + theta**2)
    ...     return [[0, -root], [root, 0]]
    """

    name = "recipe"
    _kind = Kind(has_preconditioner=False, takes_local=False)

    def __init__(
        self,
        vars: Sequence | None = None,
        *,
        D: Callable[..., Any],
        Q: Callable[..., Any] | None = None,
        auxiliaries: Sequence[str | GaussianAuxiliary] = (),
        gradient_noise: str | np.ndarray | None = None,
        gradient: Gradient = "plain",
        **settings: Unpack[CommonSettings],
    ):
        for name, matrix in (("D", D), ("Q", Q)):
            if not (callable(matrix) or (name == "Q" and matrix is None)):
                raise TypeError(
                    f"`{name}` should be a function of the position and the auxiliaries, such as "
                    f"`lambda theta, r: [[0, 0], [0, 1.0]]`, but got {matrix!r}."
                )
        self._diffusion = D
        self._curl = Q or (lambda *parts: None)
        self._gaussians = _check_auxiliaries(auxiliaries)
        for name, matrix in (("D", D), ("Q", Q)):
            if matrix is not None and not accepts(matrix, None, *self._gaussians):
                parts = ", ".join(
                    ["the position", *(gaussian.name for gaussian in self._gaussians)]
                )
                raise TypeError(
                    f"`{name}` should take one argument for each part of the state ({parts}), but "
                    f"got {matrix!r}. Name other parts in `auxiliaries`."
                )
        if isinstance(gradient_noise, str) and gradient_noise != "center":
            raise ValueError(
                f"`gradient_noise` should be 'center' or an array, but got {gradient_noise!r}."
            )
        self._gradient_noise = gradient_noise
        super().__init__(vars, gradient=gradient, **settings)

    def _design(self, setup: Setup) -> Design:
        noise = _gradient_noise(setup, self._gradient_noise)
        dynamics = RecipeDynamics(
            self._diffusion,
            self._curl,
            self._gaussians,
            None if noise is None else setup.shared(noise.values, "gradient_noise"),
        )
        values = _Matrices(dynamics, setup.posterior)
        center = setup.center if setup.settings.step_size is None else setup.known_center
        states = _random_states(setup.posterior, center, self._gaussians)
        smallest, largest = check_matrices(values, states)
        _check_moved(values, states, setup.posterior.labels)

        def computed() -> Pace:
            linear = _linearised(setup, values, self._gaussians, noise)
            step_size = largest_step(linear, setup.bias)
            choice = setup.choose_step_size(setup.center.curvature.root)
            return Pace(step_size, default_thinning(step_size, linear.slowest_rate), choice)

        pace = setup.pace(computed)
        if noise is not None:
            _check_injected(values, states, float(step_sizes(pace.step_size, 0, 1)[0]))
        dynamics = RecipeDynamics(
            dynamics.diffusion,
            dynamics.curl,
            dynamics.gaussians,
            dynamics.gradient_noise,
            # A singular matrix has no Cholesky root.
            singular=smallest < 1e-6 * largest or noise is not None,
        )
        return Design(dynamics, pace)


# --- Settings -------------------------------------------------------------------------------


def _check_auxiliaries(
    auxiliaries: Sequence[str | GaussianAuxiliary],
) -> tuple[GaussianAuxiliary, ...]:
    if isinstance(auxiliaries, str | GaussianAuxiliary):
        auxiliaries = [auxiliaries]
    if not isinstance(auxiliaries, Sequence):
        raise TypeError(
            "`auxiliaries` should be a list of names or `GaussianAuxiliary` objects, but got "
            f"{auxiliaries!r}."
        )
    gaussians = []
    for auxiliary in auxiliaries:
        auxiliary = GaussianAuxiliary(auxiliary) if isinstance(auxiliary, str) else auxiliary
        if not isinstance(auxiliary, GaussianAuxiliary):
            raise TypeError(
                "`auxiliaries` should be names or `GaussianAuxiliary` objects, but has "
                f"{auxiliary!r}."
            )
        if not (np.isfinite(auxiliary.variance) and auxiliary.variance > 0):
            raise ValueError(
                f"The variance of the auxiliary `{auxiliary.name}` should be positive and finite, "
                f"but got {auxiliary.variance}."
            )
        if auxiliary.size is not None and auxiliary.size < 1:
            raise ValueError(
                f"The size of the auxiliary `{auxiliary.name}` should be at least 1, but got "
                f"{auxiliary.size}."
            )
        gaussians.append(auxiliary)
    names = ["position", *(gaussian.name for gaussian in gaussians)]
    if len(set(names)) < len(names):
        raise ValueError(
            f"`auxiliaries` should have different names, none of them 'position', but got "
            f"{names[1:]}."
        )
    return tuple(gaussians)


def _gradient_noise(setup: Setup, setting: str | np.ndarray | None) -> Diagonal | Dense | None:
    if setting is None:
        return None
    if isinstance(setting, str):
        return rows_noise(setup)
    return check_noise(setting, setup.posterior.dimension, "gradient_noise")


# --- Checks ---------------------------------------------------------------------------------


class _Matrices:
    """Dense values of D, Q and the covariance of the noise at a state."""

    def __init__(self, dynamics: RecipeDynamics, posterior: Posterior):
        self.sizes = dynamics.sizes(posterior.dimension)
        names = ["position", *(gaussian.name for gaussian in dynamics.gaussians)]
        parts = [
            pt.tensor(name, shape=(size,), dtype=posterior.dtype)
            for name, size in zip(names, self.sizes, strict=True)
        ]
        step_size = pt.scalar("step_size", dtype=posterior.dtype)
        D, Q = dynamics.matrices(parts)
        injected = dynamics.injected_covariance(D, Q, step_size)
        dense = [assemble(blocks, self.sizes) for blocks in (D, Q, injected)]
        self._evaluate = compile_quietly([*parts, step_size], dense, PYTHON_MODE)
        self.dtype = posterior.dtype
        present = {i for i, _ in D}
        diffusing = np.repeat([i in present for i in range(len(self.sizes))], self.sizes)
        self.diffusing = np.ix_(diffusing, diffusing)

    def __call__(self, state: Sequence[np.ndarray], step_size: float = 0.0) -> list[np.ndarray]:
        """D, Q and the covariance of the injected noise divided by h."""
        arguments = [np.asarray(each, dtype=self.dtype) for each in (*state, step_size)]
        return [np.asarray(matrix, dtype=float) for matrix in self._evaluate(*arguments)]


def _random_states(
    posterior: Posterior, center: Center | None, gaussians: Sequence[GaussianAuxiliary]
) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(2015)
    start, root = posterior.initial_position, as_matrix(1.0)
    if center is not None:
        start, root = center.position, center.curvature.root
    return [
        [
            start + root @ rng.standard_normal(posterior.dimension),
            *(
                gaussian.mean
                + np.sqrt(gaussian.variance)
                * rng.standard_normal(gaussian.size or posterior.dimension)
                for gaussian in gaussians
            ),
        ]
        for _ in range(CHECKED_POINTS)
    ]


def check_matrices(
    values: _Matrices, states: Sequence[Sequence[np.ndarray]]
) -> tuple[float, float]:
    """Smallest and largest eigenvalue of a valid D, without the parts that D has no block for.

    Raises
    ------
    ValueError
        Where D or Q breaks a condition of the recipe; the message says by how much.
    """
    tolerance = 1e-8 if values.dtype == "float64" else 1e-4
    smallest, largest = np.inf, 0.0
    for state in states:
        D, Q, _ = values(state)
        at = f"at the random state {[np.round(part[:5], 3).tolist() for part in state]}"
        for name, matrix in (("D", D), ("Q", Q)):
            if not np.isfinite(matrix).all():
                raise ValueError(f"`{name}` should be finite, but is not {at}.")
        size = max(np.abs(D).max(), np.finfo(float).tiny)
        asymmetry = np.abs(D - D.T).max()
        if asymmetry > tolerance * size:
            raise ValueError(
                f"`D` should be symmetric, but D - Dᵀ has an entry of size {asymmetry:.3g} {at}."
            )
        skewness = np.abs(Q + Q.T).max()
        if skewness > tolerance * max(np.abs(Q).max(), np.finfo(float).tiny):
            raise ValueError(
                "`Q` should be skew-symmetric, Q = -Qᵀ, but Q + Qᵀ has an entry of size "
                f"{skewness:.3g} {at}."
            )
        if not D.any():
            raise ValueError(
                f"`D` is zero {at}, so the chain would stay on one orbit. Give some part of the "
                "state a positive diffusion."
            )
        eigenvalues = linalg.eigvalsh(D[values.diffusing])
        if eigenvalues[0] < -tolerance * size:
            raise ValueError(
                "`D` should be positive semi-definite, but its smallest eigenvalue is "
                f"{eigenvalues[0]:.3g} {at}."
            )
        smallest, largest = min(smallest, eigenvalues[0]), max(largest, eigenvalues[-1])
    return smallest, largest


def _check_moved(
    values: _Matrices, states: Sequence[Sequence[np.ndarray]], labels: Sequence[str]
) -> None:
    """Refuse D and Q that do not move a direction of the position in any state.

    Raises
    ------
    ValueError
    """
    d = len(labels)
    moves = np.hstack([D[:d] + Q[:d] for D, Q, _ in (values(state) for state in states)])
    sizes = np.linalg.norm(moves, axis=1)
    still = np.flatnonzero(sizes == 0)
    if not len(still):
        moves /= sizes[:, None]
        # Eigenvalues of products of rows of length one, as of correlations.
        if linalg.eigvalsh(moves @ moves.T, subset_by_index=[0, 0])[0] > (
            SINGULAR if values.dtype == "float64" else SINGLE_SINGULAR
        ):
            return
        still = dependent_coordinates(moves @ moves.T)
    names = ", ".join(f"`{labels[number]}`" for number in still[:FEW_NAMES])
    combination = "a combination of " if sizes.all() else ""
    raise ValueError(
        f"`D` and `Q` do not move {combination}{names}, so draws would not be of the posterior. "
        "Give it a positive diffusion in `D`, or a coupling to a momentum in `Q`."
    )


def _check_injected(
    values: _Matrices, states: Sequence[Sequence[np.ndarray]], step_size: float
) -> None:
    for state in states:
        D, _, injected = values(state, step_size)
        smallest = linalg.eigvalsh(injected)[0]
        if smallest < -1e-6 * np.abs(D).max():
            raise ValueError(
                "`gradient_noise` is more than the noise of a step: D - (h/4)(D + Q) V (D + Q)ᵀ "
                f"has the eigenvalue {smallest:.3g} at step size {step_size:.3g}. Use a smaller "
                "`step_size` or no `gradient_noise`."
            )


# --- Step size ------------------------------------------------------------------------------


class LinearProcess:
    r"""The chain linearised at the centre: a matrix recursion of its covariance.

    .. math:: \Lambda = F \Lambda F^\top + h D + \tfrac{h^2}{4} A (V - \hat V) A^\top, \qquad
              F = I - \tfrac{h}{2} A P, \quad A = D + Q

    with P the precision of the target: the curvature H for the position, and the inverse variances
    of the auxiliaries.

    Parameters
    ----------
    D, Q : (m, m) arrays
    precision : (m, m) array
        The precision P.
    noise : (d, d) array
        :math:`V - \hat V`.
    """

    def __init__(self, D: np.ndarray, Q: np.ndarray, precision: np.ndarray, noise: np.ndarray):
        d = len(noise)
        A = D + Q
        # Auxiliaries that are not coupled at the centre, such as a thermostat, are left out.
        used = np.abs(A).max(0) + np.abs(A).max(1) > 0
        used[:d] = True
        keep = np.ix_(used, used)
        self._slope = (A @ precision)[keep]
        self._diffusion = D[keep]
        self._noise = (A[:, :d] @ noise @ A[:, :d].T)[keep]
        self._root = linalg.cholesky(precision[:d, :d], lower=True)
        rates = linalg.eigvals(self._slope).real
        self.rate, self.slowest_rate = float(rates.max()), float(rates.min())

    def inflation(self, step_size: float) -> float:
        """Largest relative excess of a variance of the position; infinite where unstable."""
        h = step_size
        F = np.eye(len(self._slope)) - h / 2 * self._slope
        if np.abs(linalg.eigvals(F)).max() >= 1:
            return np.inf
        constant = h * self._diffusion + h**2 / 4 * self._noise
        covariance = linalg.solve_discrete_lyapunov(F, constant)
        d = len(self._root)
        relative = self._root.T @ covariance[:d, :d] @ self._root
        return float(linalg.eigvalsh(0.5 * (relative + relative.T))[-1] - 1)


def largest_step(process: LinearProcess, inflation: float) -> float:
    """Largest step, to one percent, with at most the given inflation.

    Raises
    ------
    ValueError
        Where there is no such step.
    """
    if process.rate > 0:
        high = 4 / process.rate
        low = high
        for _ in range(60):
            low /= 2
            if process.inflation(low) <= inflation:
                break
        else:
            low = 0.0
        high = 2 * low
        while low > 0 and high > 1.01 * low:
            middle = np.sqrt(low * high)
            low, high = (middle, high) if process.inflation(middle) <= inflation else (low, middle)
        if low > 0:
            return float(low)
    raise ValueError(
        "No step size keeps the variances of the process of `D` and `Q` within "
        f"{100 * inflation:.0f} % of the posterior's at the centre. Make noise reach all "
        "directions, or give `step_size`."
    )


def _linearised(
    setup: Setup,
    values: _Matrices,
    gaussians: Sequence[GaussianAuxiliary],
    subtracted: Matrix | None,
) -> LinearProcess:
    d, total = setup.posterior.dimension, sum(values.sizes)
    if total > LARGEST_LINEAR_STATE:
        raise ValueError(
            f"A step size is computed for at most {LARGEST_LINEAR_STATE} coordinates, but the "
            f"state has {total}. Give `step_size`."
        )
    sizes = values.sizes[1:]
    means = [np.full(n, each.mean) for n, each in zip(sizes, gaussians, strict=True)]
    D, Q, _ = values([setup.center.position, *means])
    precision = np.zeros((total, total))
    precision[:d, :d] = setup.center.curvature.precision.dense()
    variances = np.repeat([each.variance for each in gaussians], sizes)
    precision[range(d, total), range(d, total)] = 1 / variances
    deviations = setup.gradient_deviations()
    noise = deviations.T @ deviations
    if subtracted is not None:
        noise = noise - subtracted.dense(d)
    return LinearProcess(D, Q, precision, noise)
