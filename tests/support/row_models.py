"""Models whose likelihood is a sum over rows, each of which can be built in both ways of PyMC.

A case is a set of arrays with a common leading length, and a function that writes the model on
them. The function does not know whether it gets the full arrays (constants or `pymc.Data`) or the
minibatches of one `pymc.Minibatch` call. So both ways give the same model by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.pytensorf import convert_data

N_ROWS = 37
BATCH_SIZE = 11


@dataclass(frozen=True)
class Case:
    """A model on given arrays: `write(arrays, **total)` is called inside a model context.

    `total` is empty or has `total_size`, and goes to each observed variable.
    """

    name: str
    data: Mapping[str, Any]
    write: Callable[..., None]
    coords: Mapping[str, Any]

    @property
    def n_rows(self) -> int:
        return len(next(iter(self.data.values())))

    def ordinary(self, name: str = "") -> pm.Model:
        """The model on the full arrays, as constants."""
        with pm.Model(coords=self.coords, name=name) as model:
            self.write(dict(self.data))
        return model

    def with_data(self, name: str = "") -> pm.Model:
        """The model on the full arrays, each as `pymc.Data`."""
        with pm.Model(coords=self.coords, name=name) as model:
            self.write({key: pm.Data(f"{key}_data", value) for key, value in self.data.items()})
        return model

    def minibatch(self, batch_size: int = BATCH_SIZE, name: str = "") -> pm.Model:
        """The model on minibatches of one `pymc.Minibatch` call."""
        with pm.Model(coords=self.coords, name=name) as model:
            # PyMC 6.4 refuses an observed minibatch whose precision it would have to change.
            arrays = [convert_data(value) for value in self.data.values()]
            drawn = pm.Minibatch(*arrays, batch_size=batch_size)
            drawn = drawn if isinstance(drawn, list) else [drawn]
            self.write(dict(zip(self.data, drawn, strict=True)), total_size=self.n_rows)
        return model


CASES: dict[str, Case] = {}


def case(coords: Mapping[str, Any] | None = None, **data: Any) -> Callable:
    """Register a function that writes a model on these arrays."""

    def register(write: Callable[..., None]) -> Callable[..., None]:
        CASES[write.__name__] = Case(write.__name__, data, write, dict(coords or {}))
        return write

    return register


_rng = np.random.default_rng(20_251_012)
X = _rng.normal(size=(N_ROWS, 3))
GROUP = _rng.integers(0, 4, size=N_ROWS)
Y = X @ [0.5, -1.0, 0.3] + 0.4 * _rng.normal(size=N_ROWS)
COUNTS = _rng.poisson(np.exp(0.3 * X[:, 0] + 0.5))
BINARY = _rng.integers(0, 2, size=N_ROWS)
KIND = _rng.integers(0, 3, size=N_ROWS)
POSITIVE = _rng.gamma(2.0, size=N_ROWS) + 0.1
FEATURES = {"feature": ["age", "dose", "sex"]}
GROUPS = {"group": list("abcd")}


# --- Common kinds of model ------------------------------------------------------------------


@case(FEATURES, X=X, y=Y)
def linear(data, **total):
    beta = pm.Normal("beta", 0, 2, dims="feature")
    intercept = pm.Normal("intercept")
    sigma = pm.HalfNormal("sigma")
    pm.Normal("y", intercept + data["X"] @ beta, sigma, observed=data["y"], **total)


@case(FEATURES, X=X, y=BINARY)
def logistic(data, **total):
    beta = pm.Normal("beta", dims="feature")
    pm.Bernoulli("y", logit_p=pm.math.dot(data["X"], beta), observed=data["y"], **total)


@case(X=X, exposure=POSITIVE, y=COUNTS)
def poisson_with_exposure(data, **total):
    beta = pm.Normal("beta", 0, 0.5, shape=3)
    rate = data["exposure"] * pm.math.exp(data["X"] @ beta)
    pm.Poisson("y", rate, observed=data["y"], **total)


@case(X=X, y=COUNTS)
def negative_binomial(data, **total):
    beta = pm.Normal("beta", 0, 0.5, shape=3)
    alpha = pm.Gamma("alpha", 2, 1)
    pm.NegativeBinomial("y", mu=pt.exp(data["X"] @ beta), alpha=alpha, observed=data["y"], **total)


@case({**FEATURES, "kind": ["u", "v", "w"]}, X=X, y=KIND)
def categorical(data, **total):
    W = pm.Normal("W", dims=("feature", "kind"))
    pm.Categorical("y", logit_p=data["X"] @ W, observed=data["y"], **total)


@case(X=X, trials=np.full(N_ROWS, 6), y=_rng.multinomial(6, [0.2, 0.3, 0.5], size=N_ROWS))
def multinomial(data, **total):
    W = pm.Normal("W", shape=(3, 3))
    p = pm.math.softmax(data["X"] @ W, axis=1)
    pm.Multinomial("y", n=data["trials"], p=p, observed=data["y"], **total)


@case(GROUPS, group=GROUP, x=X[:, 0], y=Y)
def hierarchical_centred(data, **total):
    mu = pm.Normal("mu")
    tau = pm.HalfNormal("tau")
    intercepts = pm.Normal("intercepts", mu, tau, dims="group")
    slope = pm.Normal("slope")
    pm.Normal("y", intercepts[data["group"]] + slope * data["x"], 0.5, observed=data["y"], **total)


@case(GROUPS, group=GROUP, x=X[:, 0], y=Y)
def hierarchical_non_centred(data, **total):
    mu = pm.Normal("mu")
    tau = pm.HalfNormal("tau")
    offset = pm.Normal("offset", dims="group")
    intercepts = pm.Deterministic("intercepts", mu + tau * offset, dims="group")
    slope = pm.Normal("slope")
    pm.Normal("y", intercepts[data["group"]] + slope * data["x"], 0.5, observed=data["y"], **total)


@case(X=X, y=Y, count=COUNTS)
def two_observed(data, **total):
    beta = pm.Normal("beta", 0, 0.5, shape=3)
    predictor = data["X"] @ beta
    pm.Normal("y", predictor, 1.0, observed=data["y"], **total)
    pm.Poisson("count", pm.math.exp(predictor), observed=data["count"], **total)


@case(X=X, y=Y)
def student_t(data, **total):
    nu = pm.Gamma("nu", 2, 0.1)
    sigma = pm.HalfCauchy("sigma", 1)
    beta = pm.Normal("beta", shape=3)
    pm.StudentT("y", nu=nu, mu=data["X"] @ beta, sigma=sigma, observed=data["y"], **total)


@case(x=X[:, 0], weight=POSITIVE, y=Y)
def weighted(data, **total):
    slope = pm.Normal("slope")
    sigma = pm.HalfNormal("sigma")

    def logp(value, mu, sigma, weight):
        return weight * pm.logp(pm.Normal.dist(mu, sigma), value)

    pm.CustomDist(
        "y", slope * data["x"], sigma, data["weight"], logp=logp, observed=data["y"], **total
    )


# --- Transforms -----------------------------------------------------------------------------


@case(y=KIND)
def simplex(data, **total):
    p = pm.Dirichlet("p", np.array([2.0, 1.0, 3.0]))
    pm.Categorical("y", p=p, observed=data["y"], **total)


@case(y=BINARY)
def beta_probability(data, **total):
    p = pm.Beta("p", 2, 2)
    pm.Bernoulli("y", p=p, observed=data["y"], **total)


@case(X=X, y=KIND)
def ordered_cutpoints(data, **total):
    beta = pm.Normal("beta", shape=3)
    cutpoints = pm.Normal(
        "cutpoints", shape=2, transform=pm.distributions.transforms.ordered, initval=[-1.0, 1.0]
    )
    pm.OrderedLogistic("y", eta=data["X"] @ beta, cutpoints=cutpoints, observed=data["y"], **total)


@case(y=_rng.normal(size=(N_ROWS, 3)))
def lkj_covariance(data, **total):
    mu = pm.Normal("mu", shape=3)
    chol, _, _ = pm.LKJCholeskyCov("chol", n=3, eta=2, sd_dist=pm.Exponential.dist(1.0))
    pm.MvNormal("y", mu, chol=chol, observed=data["y"], **total)


@case(GROUPS, group=GROUP, y=Y)
def zero_sum(data, **total):
    effects = pm.ZeroSumNormal("effects", sigma=1.0, dims="group")
    pm.Normal("y", effects[data["group"]], 1.0, observed=data["y"], **total)


# --- Shapes and ways of writing -------------------------------------------------------------


@case(X=X, y=_rng.normal(size=(N_ROWS, 2)))
def two_columns(data, **total):
    W = pm.Normal("W", shape=(3, 2))
    pm.Normal("y", data["X"] @ W, 1.0, observed=data["y"], **total)


@case(X=_rng.normal(size=(N_ROWS, 2, 3)), y=Y)
def three_axes(data, **total):
    W = pm.Normal("W", shape=(2, 3))
    pm.Normal("y", (data["X"] * W).sum(axis=(1, 2)), 1.0, observed=data["y"], **total)


@case(x=X[:, 0], z=BINARY, y=Y)
def interactions(data, **total):
    beta = pm.Normal("beta", shape=4)
    x, z = data["x"], data["z"]
    design = pt.concatenate([x[:, None], z[:, None], (x * z)[:, None], x[:, None] ** 2], axis=1)
    pm.Normal("y", design @ beta, 1.0, observed=data["y"], **total)


@case(x=X[:, 0], z=X[:, 1], y=Y)
def stacked_columns(data, **total):
    beta = pm.Normal("beta", shape=3)
    design = pt.stack([pt.ones_like(data["x"]), data["x"], data["z"]], axis=1)
    pm.Normal("y", pm.math.sum(design * beta, axis=1), 1.0, observed=data["y"], **total)


@case(x=X[:, 0], y=Y)
def transposed(data, **total):
    beta = pm.Normal("beta", shape=2)
    design = pt.stack([pt.ones(data["x"].shape[0]), data["x"]])
    pm.Normal("y", beta @ design, 1.0, observed=data["y"], **total)


@case(X=X)
def predicts_itself(data, **total):
    W = pm.Normal("W", shape=(3, 3))
    pm.Normal("X", data["X"] @ W, 1.0, observed=data["X"], **total)


@case(left=GROUP, right=GROUP[::-1].copy(), y=Y)
def indexed_matrix(data, **total):
    table = pm.Normal("table", shape=(4, 4))
    pm.Normal("y", table[data["left"], data["right"]], 1.0, observed=data["y"], **total)


@case(x=X[:, 0], y=COUNTS)
def zero_inflated(data, **total):
    slope = pm.Normal("slope")
    psi = pm.Beta("psi", 2, 2)
    rate = pm.math.exp(slope * data["x"])
    pm.ZeroInflatedPoisson("y", psi=psi, mu=rate, observed=data["y"], **total)


@case(y=Y)
def mixture(data, **total):
    w = pm.Dirichlet("w", np.ones(2))
    mu = pm.Normal("mu", shape=2)
    pm.NormalMixture("y", w=w, mu=mu, sigma=1.0, observed=data["y"], **total)


@case(x=X[:, 0], y=np.clip(Y, -1, 1))
def censored(data, **total):
    slope = pm.Normal("slope")
    pm.Censored(
        "y", pm.Normal.dist(slope * data["x"], 1.0), lower=-1, upper=1, observed=data["y"], **total
    )


@case(x=X[:, 0], small=GROUP.astype("uint8"), flag=BINARY.astype(bool), y=Y.astype("float32"))
def narrow_types(data, **total):
    beta = pm.Normal("beta", shape=3)
    mu = beta[0] * data["x"] + beta[1] * data["small"] + beta[2] * data["flag"]
    pm.Normal("y", mu, 1.0, observed=data["y"], **total)


@case(x=X[:, 0].astype("float32"), y=BINARY.astype("uint8"))
def byte_outcome(data, **total):
    slope = pm.Normal("slope")
    pm.Bernoulli("y", logit_p=slope * data["x"], observed=data["y"], **total)


@case(x=X[:, 0], y=BINARY.astype(bool))
def boolean_outcome(data, **total):
    slope = pm.Normal("slope")
    pm.Bernoulli("y", logit_p=slope * data["x"], observed=data["y"], **total)
