"""Time of `recover` and of `fit_marginal` by method, beside statsmodels.

Examples
--------
::

    python tests/benchmarks/marginal_tools.py --markdown docs/tables/marginal_fits.txt
    python tests/benchmarks/marginal_tools.py --methods laplace --groups 1000 --peers
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from common.clocks import timed
from common.runner import Result, Table, attempt, run, say

RECORDS = 10
LINEAR = ("exact", "MixedLM")
TITLES = {
    "laplace": 'logistic, "laplace"',
    "quadrature": 'logistic, "quadrature" with 25 nodes',
    "mcem": 'logistic, "mcem"',
    "exact": 'linear, "exact"',
}
"""Names of the fits in the table of the documentation."""
PEERS = ("BinomialBayesMixedGLM", "MixedLM")
MOST_GROUPS = {"mcem": 10_000, "BinomialBayesMixedGLM": 1000, "MixedLM": 10_000}
"""More groups take many minutes, or more memory than there is."""
FACTORS = ("students", "lecturers", "departments")
OPTIONS = {
    "groups": ((1000, 10_000, 100_000),),
    "methods": (tuple(TITLES), tuple(TITLES)),
    "peers": (PEERS, PEERS),
    "draws": (4000, "for `recover`, 0 to leave it out"),
    "recovered": (2000, "groups for `recover`"),
    "limit": (1200.0, "seconds for a fit"),
}


def run_recover(draws: int, groups: int) -> Result:
    """`recover` on draws near the truth."""
    import numpy as np
    import xarray as xr
    from common.hierarchical import TRUTH, intercepts

    from pymc_sgmcmc import recover

    rng = np.random.default_rng(1)
    posterior = {}
    for name, value in TRUTH.items():
        values = np.asarray(value) + 0.03 * rng.normal(size=(1, draws, *np.shape(value)))
        posterior[name] = (("chain", "draw", *[f"{name}_dim_0"] * np.ndim(value)), values)
    coords = {"chain": [0], "draw": np.arange(draws)}
    idata = xr.DataTree.from_dict({"posterior": xr.Dataset(posterior, coords)})
    given = {"random_seed": 1, "progressbar": False}
    _, seconds = timed(recover, idata, intercepts(groups, RECORDS), "z", **given)
    return {"what": "recover", "groups": groups, "seconds": seconds.cpu}


def run_fit(method: str, groups: int) -> Result:
    """`fit_marginal` by a method."""
    from common.hierarchical import intercepts

    from pymc_sgmcmc import fit_marginal

    model = intercepts(groups, RECORDS, linear=method in LINEAR)
    given = {"random_seed": 1} if method == "mcem" else {}
    fit, seconds = timed(fit_marginal, model, "z", method=method, **given)
    sd = float(fit.estimates["sd"])
    return {"what": method, "groups": groups, "seconds": seconds.cpu, "sd": sd}


def run_ratings() -> Result:
    """`fit_marginal` of InstEval, linear with crossed intercepts of three factors."""
    from common.hierarchical import inst_eval

    from pymc_sgmcmc import fit_marginal

    model, _ = inst_eval(None, 1, "centred")
    fit, seconds = timed(fit_marginal, model, FACTORS)
    return {
        "what": "InstEval",
        "groups": fit.n_groups,
        "seconds": seconds.cpu,
        "sd": float(fit.estimates["of_students"]),
        "deviance": fit.minus_two_log_likelihood,
    }


def run_peer(peer: str, groups: int) -> Result:
    """A fit by statsmodels; that of the logistic model is a posterior mode with its own priors."""
    import numpy as np
    import scipy.sparse
    from common.hierarchical import intercept_data

    group, X, y = intercept_data(groups, RECORDS, peer in LINEAR)
    X = np.column_stack([np.ones(len(y)), X])
    if peer == "MixedLM":
        from statsmodels.regression.mixed_linear_model import MixedLM

        fit, seconds = timed(lambda: MixedLM(y, X, groups=group).fit(reml=False))
        sd = float(np.sqrt(fit.cov_re[0, 0]))
    else:
        from statsmodels.genmod.bayes_mixed_glm import BinomialBayesMixedGLM

        Z = scipy.sparse.csr_matrix((np.ones(len(y)), (np.arange(len(y)), group)))
        fit, seconds = timed(BinomialBayesMixedGLM(y, X, Z, np.zeros(groups, dtype=int)).fit_map)
        sd = float(np.exp(fit.vcp_mean[0]))
    return {"what": peer, "groups": groups, "seconds": seconds.cpu, "sd": sd}


def results(settings: Any) -> Iterator[Result]:
    """`recover`, InstEval, then the fits by number of groups."""
    from common.hierarchical import INST_EVAL

    if settings.peers and importlib.util.find_spec("statsmodels") is None:
        say("statsmodels is not installed, so its fits are left out")
        settings.peers = []
    calls: list[tuple[Any, dict[str, Any]]] = []
    if settings.draws:
        calls.append((run_recover, {"draws": settings.draws, "groups": settings.recovered}))
    if INST_EVAL().exists():
        calls.append((run_ratings, {}))
    for groups in settings.groups:
        calls += [(run_fit, {"method": name, "groups": groups}) for name in settings.methods]
        calls += [(run_peer, {"peer": name, "groups": groups}) for name in settings.peers]
    for function, given in calls:
        name = given.get("method", given.get("peer"))
        if given.get("groups", 0) <= MOST_GROUPS.get(name, float("inf")):
            found = attempt(function, limit=settings.limit, **given)
            if found is not None:
                yield found


def tables(found: list[Result]) -> list[Table]:
    """Seconds of the fits by number of groups, InstEval, and what else was timed."""
    counts = sorted({r["groups"] for r in found if r["what"] in TITLES})

    def seconds(count: int) -> Any:
        at = {r["what"]: r["seconds"] for r in found if r["groups"] == count}
        return lambda r: at.get(r["what"], "not run")

    first = {r["what"]: r for r in reversed(found)}
    columns = {"groups": lambda r: TITLES[r["what"]]} | {str(n): seconds(n) for n in counts}
    fits = Table(
        "Seconds of fits by the number of groups, processor time of one core",
        columns,
        lambda r: r["what"] in TITLES and r is first[r["what"]],
    )
    crossed = {
        "crossed factors": "what",
        "levels": "groups",
        "seconds": "seconds",
        "-2 log likelihood": lambda r: f"{r['deviance']:.2f}",
    }
    others = {"what": "what", "groups": "groups", "seconds": "seconds", "sd of intercepts": "sd"}
    return [
        fits,
        Table("Crossed factors", crossed, lambda r: r["what"] == "InstEval"),
        Table("Beside them", others, lambda r: r["what"] in ("recover", *PEERS)),
    ]


if __name__ == "__main__":
    sys.exit(run(__doc__, results, tables, OPTIONS))
