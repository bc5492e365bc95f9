"""Verdicts of the report on ensembles of known laws."""

from __future__ import annotations

import numpy as np
import pytest

from pymc_sgmcmc.polishing.modes import Mode
from pymc_sgmcmc.polishing.report import make_report

LABELS = ("a", "b")


def report_on(rng, change=lambda draws: draws, *, moving=False, modes=(), stated=0.05, n=200):
    """Report on a run that is a change of exact draws."""
    run = change(rng.standard_normal((4, 1000, 2)))
    starts = run[:, :: 4000 // n].reshape(-1, 2)
    later = rng.standard_normal((20, len(starts), 2))
    return make_report(LABELS, run, starts, later, stated, moving, modes)


def test_right_run_is_ok(rng):
    report = report_on(rng)
    assert report.attrs["run"] == "ok"
    assert list(report["verdict"]) == ["ok", "ok"]
    assert list(report.index) == list(LABELS)
    assert "would have been found" in report.attrs["verdict"]
    np.testing.assert_allclose(report["polished_sd"], 1, atol=0.1)


@pytest.mark.parametrize(
    ("change", "verdict", "words"),
    [
        (lambda draws: draws + np.array([0.5, 0]), "mean off", "the mean of `a` by -0.5"),
        (
            lambda draws: draws * np.array([1.4, 1]),
            "variance too large",
            "the standard deviation of `a` is 1.",
        ),
        (
            lambda draws: draws * np.array([0.7, 1]),
            "variance too small",
            "the standard deviation of `a` is 0.",
        ),
        # Two points have the mean and the variance of the Gaussian.
        (lambda draws: np.sign(draws), "quantiles off", "quantile of `a` by"),
    ],
)
def test_wrong_runs_are_off(rng, change, verdict, words):
    report = report_on(rng, change)
    assert report.attrs["run"] == "off"
    assert report.loc["a", "verdict"] == verdict
    assert words in report.attrs["verdict"]
    assert "Use the polished draws" in report.attrs["verdict"]


def test_errors_within_what_was_accepted_are_ok(rng):
    def change(draws):
        return 0.05 + 1.2 * draws

    assert report_on(rng, change, stated=0.44).attrs["run"] == "ok"
    assert report_on(rng, change, stated=0.01).attrs["run"] == "off"


def test_chains_of_the_run_that_differ_have_not_converged(rng):
    report = report_on(rng, lambda draws: 0.3 * draws + np.arange(4).reshape(4, 1, 1) - 1.5)
    assert report.attrs["run"] in ("not converged", "off")
    assert "ok" not in list(report["verdict"])


def test_few_exact_chains_cannot_tell(rng):
    report = report_on(rng, n=20)
    assert report.attrs["run"] in ("cannot tell", "ok")
    later = np.repeat(rng.standard_normal((1, 20, 2)), 20, axis=0)
    run = rng.standard_normal((4, 1000, 2))
    report = make_report(LABELS, run, run[:, ::200].reshape(-1, 2), later, 0.05, False, ())
    assert report.attrs["run"] == "cannot tell"
    assert "more `draws` or `passes`" in report.attrs["verdict"]


def test_law_that_still_moves_cannot_tell(rng):
    report = report_on(rng, moving=True)
    assert report.attrs["run"] == "cannot tell"
    assert "still moves" in report.attrs["verdict"]


def test_polished_draws_that_remember_their_starts_are_not_recommended(rng):
    run = 1.0 + 0.1 * rng.standard_normal((4, 1000, 2))
    starts = run[:, ::20].reshape(-1, 2)
    report = make_report(LABELS, run, starts, np.repeat(starts[None] - 0.1, 20, 0), 0.05, False, ())
    assert report.attrs["run"] == "off"
    assert "cannot be relied on either" in report.attrs["verdict"]


def test_other_modes_are_reported(rng):
    mode = Mode(np.zeros(2), np.log(0.3), 12.0, "`a` = 12")
    report = report_on(rng, modes=[mode])
    assert report.attrs["run"] == "off"
    assert (
        "about 0.3 times the mass of what the run has seen, at `a` = 12"
        in (report.attrs["verdict"])
    )
    copy = Mode(np.zeros(2), 0.1, 12.0, "`a` = 12", is_copy=True)
    assert "exchanged labels" in report_on(rng, modes=[copy]).attrs["verdict"]
    assert "not searched" in report_on(rng, modes=None).attrs["verdict"]
