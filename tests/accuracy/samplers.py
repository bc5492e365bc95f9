"""All samplers with their defaults on some of the posteriors, compared with stored references.

    python -m tests.accuracy.samplers FOLDER_OF_DATA [--models NAME ...] [--samplers NAME ...]
        [--limit SECONDS] [--markdown FILE]

prints for each sampler and model the part of the coordinates whose mean is within 0.1 sd and whose
sd is within 5 % of the reference, the median ratio of standard deviations, the smallest number of
effective draws, R-hat, the seconds of set-up and run, and effective draws a second of the run; and
at the end a line for each sampler over all models. Runs end at the limit. It writes the table of
the documentation.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from pymc_sgmcmc import HAMCMC, OSGFS, PSGLD, SGHMC, SGLD, SGLDCV, SGNHT
from tests.accuracy.suite import compare, described, good
from tests.benchmarks.common.markdown import write_tables

SAMPLERS = {
    "SGLDCV": (SGLDCV, {}),
    "SGHMC": (SGHMC, {}),
    "SGNHT": (SGNHT, {}),
    "OSGFS": (OSGFS, {}),
    "HAMCMC": (HAMCMC, {}),
    "PSGLD": (PSGLD, {}),
    "SGLD": (SGLD, {}),
    "SGHMC, plain": (SGHMC, {"gradient": "plain"}),
    "SGNHT, plain": (SGNHT, {"gradient": "plain"}),
}
SHOWN = {
    "OSGFS": "`OSGFS` (plain gradients)",
    "SGHMC, plain": '`SGHMC(gradient="plain")`',
    "SGNHT, plain": '`SGNHT(gradient="plain")`',
}
"""Names of the samplers in the table of the documentation."""

MODELS = {
    "correlated_design": "correlation .99",
    "scales_apart": "scales 10⁴ apart",
    "rare_events": "0.5 % positives",
    "epil_poisson": "epil",
    "ordered_logistic": "ordered",
    "radon_houses": "radon",
    "contraception": "Contraception",
}
"""Posteriors, and their names in the table of the documentation."""


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise an error in the main thread after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def line(name: str, model: str, data_folder: Path, draws: int) -> dict[str, object]:
    """One run."""
    step_class, settings = SAMPLERS[name]
    table = compare(model, data_folder, step_class, draws=draws, **settings)
    seconds = table.attrs["seconds_sampled"]
    return {
        "sampler": name,
        "model": model,
        "good": good(table).mean(),
        "coordinates": len(table),
        "worst mean": table["mean_off"].abs().max(),
        "sd ratio": table["sd_ratio"].median(),
        "ESS": table["ess_bulk"].min(),
        "R-hat": table["r_hat"].max(),
        "set-up s": table.attrs["seconds_made"],
        "run s": seconds,
        "ESS/s": table["ess_bulk"].min() / seconds,
        "thin": table.attrs["thin"],
    }


def cells(lines: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table of the documentation."""
    models = list(lines["model"].unique())
    rows = [["rows, coordinates"]]
    for model in models:
        coordinates = lines.loc[lines["model"] == model, "coordinates"].iloc[0]
        rows[0].append(f"{described(model)[1]}, {coordinates}")
    for name, of_sampler in lines.groupby("sampler", sort=False):
        found = of_sampler.set_index("model")
        rows.append([SHOWN.get(str(name), f"`{name}`")])
        for model in models:
            cell = "–"
            if model in found.index:
                cell = f"{found.loc[model, 'good']:.2f}, {found.loc[model, 'ESS/s']:.0f}"
            rows[-1].append(cell)
    return ["step method", *(MODELS.get(model, model) for model in models)], rows


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--samplers", nargs="*", default=list(SAMPLERS), choices=list(SAMPLERS))
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=300)
    parser.add_argument("--markdown", type=Path, help="file for the table of the documentation")
    arguments = parser.parse_args()
    lines = []
    for model in arguments.models:
        for name in arguments.samplers:
            try:
                with limit(arguments.limit):
                    lines.append(line(name, model, arguments.data_folder, arguments.draws))
            except Exception as error:
                print(f"{name} on {model}: {type(error).__name__}: {str(error)[:150]}", flush=True)
                continue
            print(pd.DataFrame(lines[-1:]).round(3).to_string(header=False), flush=True)
        if arguments.markdown is not None:  # After each model: a long run may be stopped.
            command = "python -m tests.accuracy.samplers FOLDER_OF_DATA"
            write_tables(arguments.markdown, [cells(pd.DataFrame(lines))], command)
    table = pd.DataFrame(lines)
    table["weighted"] = table["good"] * table["coordinates"]
    whole = table.groupby("sampler", sort=False).agg(
        good=("weighted", "sum"), coordinates=("coordinates", "sum"), ess=("ESS/s", "median")
    )
    whole["good"] /= whole["coordinates"]
    print(table.drop(columns="weighted").round(3).to_string())
    print(whole.rename(columns={"ess": "median ESS/s"}).round(3).to_string())


if __name__ == "__main__":
    main()
