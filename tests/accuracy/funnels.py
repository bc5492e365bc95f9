"""Errors of runs whose posterior has centred effects, by what rows tell of their scale.

    python -m tests.accuracy.funnels [--markdown FILE]

prints the ratio of standard deviations of the log scale that the set-up predicts for the joint
model, and the errors of the joint model and of groups, against the exact law. It writes the
table of the documentation.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

import numpy as np
import pymc as pm

from pymc_sgmcmc import sample
from pymc_sgmcmc.tuning.funnel import find_funnel
from tests.benchmarks.common.markdown import markdown_table, write_tables
from tests.support.effects import Effects, examined, moments

CASES = [
    Effects(8, 300, 0.3),
    Effects(5, 2000, 0.05),
    Effects(30, 20, 0.3),
    Effects(8, 300, 0.1),
    Effects(30, 300, 0.05),
    Effects(8, 300, 0.02),
]
COLUMNS = (
    "groups",
    "records of each",
    "sd of effects",
    "predicted",
    "joint: mean off",
    "sd ratio",
    "by groups: mean off",
    "sd ratio",
)


def predicted(model: pm.Model) -> str:
    """Ratio of standard deviations in a funnel."""
    funnel = find_funnel(*examined(model))
    return "–" if funnel is None else f"{funnel.sd_ratio:.2f}"


def errors(case: Effects, marginalize: list[str] | None) -> list[str]:
    """Errors of mean and standard deviation of the log scale."""
    idata = sample(
        2000,
        model=case.model(),
        marginalize=marginalize,
        cores=1,
        random_seed=1,
        progressbar=False,
        quiet=True,
    )
    drawn = np.log(idata["posterior"]["tau"].to_numpy())
    mean, sd = moments(*case.law_of_log_scale())
    return [f"{(drawn.mean() - mean) / sd:.2f} sd", f"{drawn.std() / sd:.2f}"]


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    rows = []
    for case in CASES:
        row = [str(case.groups), str(case.records), str(case.scale), predicted(case.model())]
        rows.append([*row, *errors(case, None), *errors(case, ["effects"])])
        print(rows[-1], flush=True)
    print(markdown_table(COLUMNS, rows))
    if arguments.markdown is not None:
        write_tables(arguments.markdown, [(COLUMNS, rows)], "python -m tests.accuracy.funnels")


if __name__ == "__main__":
    main()
