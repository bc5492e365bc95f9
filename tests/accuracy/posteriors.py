"""Models whose posteriors are compared with a reference: full data, real where some fit.

Each function takes the folder of the real data sets, also where the data are simulated.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pymc as pm
import pytensor.tensor as pt

from pymc_sgmcmc.datasets import load
from tests.accuracy import gallery
from tests.accuracy.designs import (
    design_coords,
    sigmoid,
    simulated_design,
    standardised_design,
)

COVERTYPE_QUANTITATIVE = 10
"""Columns of the covertype data that are numbers, ahead of the indicators."""


# Real data: generalised linear models


def skin_logistic(data_folder: Path) -> pm.Model:
    """Logistic regression of skin against the three colours: N = 245 057, d = 4."""
    data = load("skin", data_folder)
    X = standardised_design(data.X)
    y = np.asarray(data.y, dtype=bool)
    with pm.Model(coords={"feature": ["intercept", *data.feature_names]}) as model:
        beta = pm.Normal("beta", 0.0, 10.0, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def covertype_two_classes(data_folder: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Columns that vary, whether the cover is lodgepole pine (class 2), names of the columns."""
    data = load("covertype", data_folder)
    X = data.X.astype(float)
    varies = X.std(0) > 0
    names = [name for name, kept in zip(data.feature_names, varies, strict=True) if kept]
    return X[:, varies], data.y == 2, names


def covertype_logistic(data_folder: Path) -> pm.Model:
    """Logistic regression of lodgepole pine, numbers standardised: N = 92 962, d = 54.

    Soil type 15 has no rows in the sample. The indicators of wilderness areas and of soil types
    are each complete, so two directions are known by the prior alone, and five soil types have
    rows of one class only. Priors as Gelman et al. (2008) advise, an indicator's effect in logits.
    """
    X, y, names = covertype_two_classes(data_folder)
    X = np.column_stack(
        [standardised_design(X[:, :COVERTYPE_QUANTITATIVE]), X[:, COVERTYPE_QUANTITATIVE:]]
    )
    with pm.Model(coords={"feature": ["intercept", *names]}) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def covertype_logistic_raw(data_folder: Path) -> pm.Model:
    """Logistic regression of lodgepole pine on columns as they are: N = 92 962, d = 54.

    Elevations in metres beside indicators: posterior sds from 1e-5 to the prior's 2.5. Priors as
    in the standardised model, but for the intercept, which is that at sea level here.
    """
    X, y, names = covertype_two_classes(data_folder)
    units = np.ones(X.shape[1])
    units[:COVERTYPE_QUANTITATIVE] = X[:, :COVERTYPE_QUANTITATIVE].std(0)
    X = np.column_stack([np.ones(len(X)), X])
    with pm.Model(coords={"feature": ["intercept", *names]}) as model:
        beta = pm.Normal("beta", 0.0, np.concatenate([[50.0], 2.5 / units]), dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def covertype_multinomial(data_folder: Path) -> pm.Model:
    """Softmax regression of the seven cover types on ten numbers: N = 20 000, d = 66.

    Class 2, the most frequent, is the reference.
    """
    data = load("covertype", data_folder)
    rows = np.sort(np.random.default_rng(7).choice(len(data.frame), 20_000, replace=False))
    X = standardised_design(data.X[rows, :COVERTYPE_QUANTITATIVE])
    # The reference class first: 0 is class 2, then classes 1, 3, 4, 5, 6 and 7.
    y = np.array([-1, 1, 0, 2, 3, 4, 5, 6])[data.y[rows]]
    coords = {
        "feature": ["intercept", *data.feature_names[:COVERTYPE_QUANTITATIVE]],
        "cover": [1, 3, 4, 5, 6, 7],
    }
    with pm.Model(coords=coords) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims=("feature", "cover"))
        logits = pt.concatenate([np.zeros((len(y), 1)), X @ beta], axis=1)
        pm.Categorical("y", logit_p=logits, observed=y)
    return model


def epil_poisson(data_folder: Path) -> pm.Model:
    """Poisson regression of seizures on treatment and covariates: N = 236, d = 6."""
    frame = load("epil", data_folder).frame
    treated = (frame["trt"] == "progabide").to_numpy(dtype=float)
    lbase = frame["lbase"].to_numpy()
    X = np.column_stack(
        [np.ones(len(frame)), lbase, treated, lbase * treated, frame["lage"], frame["V4"]]
    )
    features = ["intercept", "lbase", "progabide", "lbase:progabide", "lage", "V4"]
    with pm.Model(coords={"feature": features}) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        pm.Poisson("y", pt.exp(X @ beta), observed=frame["y"].to_numpy())
    return model


# Simulated: further families


def negative_binomial(data_folder: Path) -> pm.Model:
    """Negative binomial regression, dispersion unknown: N = 20 000, d = 8."""
    rng = np.random.default_rng(11)
    X = simulated_design(rng, 20_000, 6)
    mu = np.exp(X @ [1.0, 0.5, -0.4, 0.3, -0.2, 0.1, 0.0])
    y = rng.poisson(mu * rng.gamma(1.5, 1 / 1.5, size=len(X)))
    with pm.Model(coords=design_coords(6)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        alpha = pm.Gamma("alpha", 2.0, 1.0)
        pm.NegativeBinomial("y", mu=pt.exp(X @ beta), alpha=alpha, observed=y)
    return model


def student_t_regression(data_folder: Path) -> pm.Model:
    """Linear regression with Student's t, scale and nu unknown: N = 20 000, d = 8."""
    rng = np.random.default_rng(12)
    X = simulated_design(rng, 20_000, 5)
    y = X @ [1.0, 2.0, -1.0, 0.5, 0.0, -0.5] + 1.5 * rng.standard_t(4.0, size=len(X))
    with pm.Model(coords=design_coords(5)) as model:
        beta = pm.Normal("beta", 0.0, 10.0, dims="feature")
        sigma = pm.HalfNormal("sigma", 5.0)
        nu = pm.Gamma("nu", 2.0, 0.1)
        pm.StudentT("y", nu=nu, mu=X @ beta, sigma=sigma, observed=y)
    return model


def gamma_glm(data_folder: Path) -> pm.Model:
    """Gamma regression with a log link, shape unknown: N = 20 000, d = 6."""
    rng = np.random.default_rng(13)
    X = simulated_design(rng, 20_000, 4)
    mu = np.exp(X @ [2.0, 0.3, -0.3, 0.2, 0.0])
    y = rng.gamma(2.5, mu / 2.5)
    with pm.Model(coords=design_coords(4)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        shape = pm.Gamma("shape", 2.0, 0.5)
        pm.Gamma("y", alpha=shape, beta=shape * pt.exp(-(X @ beta)), observed=y)
    return model


def beta_binomial(data_folder: Path) -> pm.Model:
    """Beta-binomial regression, concentration unknown: N = 10 000, d = 5."""
    rng = np.random.default_rng(14)
    X = simulated_design(rng, 10_000, 3)
    mu = sigmoid(X @ [-0.5, 0.8, -0.4, 0.2])
    trials = rng.integers(5, 31, size=len(X))
    y = rng.binomial(trials, rng.beta(8.0 * mu, 8.0 * (1 - mu)))
    with pm.Model(coords=design_coords(3)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        concentration = pm.Gamma("concentration", 2.0, 0.1)
        p = pm.math.invlogit(X @ beta)
        pm.BetaBinomial(
            "y", alpha=concentration * p, beta=concentration * (1 - p), n=trials, observed=y
        )
    return model


# Hierarchical


def contraception_data(
    data_folder: Path,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, list]]:
    """Design, district numbers from 0, use, and coords."""
    frame = load("contraception", data_folder).frame
    livch = [(frame["livch"] == level).to_numpy(dtype=float) for level in ("1", "2", "3+")]
    age = frame["age"].to_numpy() / 10
    X = np.column_stack([np.ones(len(frame)), frame["urban"], age, *livch])
    districts, district = np.unique(frame["district"], return_inverse=True)
    features = ["intercept", "urban", "age/10", "livch1", "livch2", "livch3+"]
    coords = {"feature": features, "district": districts.tolist()}
    return X, district, frame["use"].to_numpy(dtype=bool), coords


def contraception(data_folder: Path) -> pm.Model:
    """Logistic regression with non-centred intercepts of 60 districts: N = 1934, d = 67."""
    X, district, y, coords = contraception_data(data_folder)
    with pm.Model(coords=coords) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        scale = pm.HalfNormal("scale", 1.0)
        z = pm.Normal("z", 0.0, 1.0, dims="district")
        pm.Bernoulli("y", logit_p=X @ beta + scale * z[district], observed=y)
    return model


def contraception_centred(data_folder: Path) -> pm.Model:
    """Logistic regression with centred intercepts of 60 districts: N = 1934, d = 67."""
    X, district, y, coords = contraception_data(data_folder)
    with pm.Model(coords=coords) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        scale = pm.HalfNormal("scale", 1.0)
        u = pm.Normal("u", 0.0, scale, dims="district")
        pm.Bernoulli("y", logit_p=X @ beta + u[district], observed=y)
    return model


def linear_mixed(data_folder: Path) -> pm.Model:
    """Reaction times in the manner of sleepstudy, 1000 for each subject: N = 100 000, d = 205.

    Centred intercepts and slopes of 100 subjects: the data tell each of them well.
    """
    rng = np.random.default_rng(15)
    subjects, each = 100, 1000
    subject = np.repeat(np.arange(subjects), each)
    days = np.tile(np.arange(10.0), subjects * each // 10)
    true_intercept = rng.normal(250.0, 25.0, size=subjects)
    true_slope = rng.normal(10.0, 6.0, size=subjects)
    y = true_intercept[subject] + true_slope[subject] * days
    y += rng.normal(0.0, 25.0, size=len(y))
    with pm.Model(coords={"subject": np.arange(subjects)}) as model:
        intercept_mean = pm.Normal("intercept_mean", 250.0, 100.0)
        slope_mean = pm.Normal("slope_mean", 0.0, 20.0)
        intercept_scale = pm.HalfNormal("intercept_scale", 50.0)
        slope_scale = pm.HalfNormal("slope_scale", 20.0)
        intercept = pm.Normal("intercept", intercept_mean, intercept_scale, dims="subject")
        slope = pm.Normal("slope", slope_mean, slope_scale, dims="subject")
        sigma = pm.HalfNormal("sigma", 50.0)
        pm.Normal("y", intercept[subject] + slope[subject] * days, sigma, observed=y)
    return model


# Simulated: hard shapes and large sizes


def rare_events(data_folder: Path) -> pm.Model:
    """Logistic regression with 0.5 % positives: N = 50 000, d = 7."""
    rng = np.random.default_rng(16)
    X = simulated_design(rng, 50_000, 6)
    y = rng.random(len(X)) < sigmoid(X @ [-5.8, 0.8, -0.6, 0.4, 0.2, 0.0, -0.2])
    with pm.Model(coords=design_coords(6)) as model:
        beta = pm.Normal("beta", 0.0, 5.0, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def correlated_design(data_folder: Path) -> pm.Model:
    """Logistic regression on eight columns of pairwise correlation 0.99: N = 20 000, d = 9."""
    rng = np.random.default_rng(17)
    shared = rng.standard_normal((20_000, 1))
    X = simulated_design(rng, 20_000, 8)
    X[:, 1:] = np.sqrt(0.99) * shared + np.sqrt(0.01) * X[:, 1:]
    y = rng.random(len(X)) < sigmoid(X @ [-0.5, 1.0, -0.8, 0.5, 0.0, 0.3, -0.3, 0.6, -0.2])
    with pm.Model(coords=design_coords(8)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def scales_apart(data_folder: Path) -> pm.Model:
    """Linear regression on columns with sds from 0.01 to 100: N = 20 000, d = 8."""
    rng = np.random.default_rng(18)
    sds = np.logspace(-2, 2, 6)
    X = simulated_design(rng, 20_000, 6)
    X[:, 1:] = sds * (1.0 + X[:, 1:])
    y = X @ [3.0, *(np.array([0.5, -0.5, 0.3, -0.3, 0.1, 0.0]) / sds)]
    y += rng.normal(0.0, 2.0, size=len(y))
    with pm.Model(coords=design_coords(6)) as model:
        beta = pm.Normal("beta", 0.0, 100.0, dims="feature")
        sigma = pm.HalfNormal("sigma", 10.0)
        pm.Normal("y", X @ beta, sigma, observed=y)
    return model


def wide(data_folder: Path) -> pm.Model:
    """Logistic regression with many slopes: N = 50 000, d = 500."""
    rng = np.random.default_rng(19)
    X = simulated_design(rng, 50_000, 499)
    y = rng.random(len(X)) < sigmoid(X @ rng.normal(0.0, 0.06, size=500))
    with pm.Model(coords=design_coords(499)) as model:
        beta = pm.Normal("beta", 0.0, 1.0, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


def million(data_folder: Path) -> pm.Model:
    """Logistic regression on many rows: N = 1 000 000, d = 10."""
    rng = np.random.default_rng(20)
    X = simulated_design(rng, 1_000_000, 9)
    y = rng.random(len(X)) < sigmoid(X @ [-1.0, 1.0, -0.8, 0.6, -0.4, 0.2, -0.1, 0.05, 0.0, 0.5])
    with pm.Model(coords=design_coords(9)) as model:
        beta = pm.Normal("beta", 0.0, 2.5, dims="feature")
        pm.Bernoulli("y", logit_p=X @ beta, observed=y)
    return model


MODELS = {
    function.__name__: function
    for function in (
        skin_logistic,
        covertype_logistic,
        covertype_logistic_raw,
        covertype_multinomial,
        epil_poisson,
        negative_binomial,
        student_t_regression,
        gamma_glm,
        beta_binomial,
        contraception,
        contraception_centred,
        linear_mixed,
        rare_events,
        correlated_design,
        scales_apart,
        wide,
        million,
        *gallery.WITHOUT_GROUPS,
        *gallery.WITH_GROUPS,
    )
}
