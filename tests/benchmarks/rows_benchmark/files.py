"""Parquet files of a logistic regression, and the Laplace approximation of its posterior."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rows_benchmark import PRIOR_SD

FILE_ROWS = 1_000_000
"""A file has so many rows at most, in one row group: 44 MB with 10 columns."""
NEWTON_STEPS = 12


def columns(features: int) -> list[str]:
    """Names of the covariates."""
    return [f"x{number}" for number in range(features)]


def write_files(folder: Path, rows: int, features: int) -> None:
    """Simulate rows of 32-bit numbers. Covariates are correlated by .5, the predictor has sd 1."""
    folder.mkdir(parents=True)
    slopes = np.linspace(-1, 1, features)
    slopes /= np.sqrt(0.5 * (slopes @ slopes + slopes.sum() ** 2))
    for number, start in enumerate(range(0, rows, FILE_ROWS)):
        rng = np.random.default_rng([rows, number])
        count = min(FILE_ROWS, rows - start)
        shared = rng.standard_normal((count, 1), dtype=np.float32)
        own = rng.standard_normal((count, features), dtype=np.float32)
        X = np.float32(np.sqrt(0.5)) * (shared + own)
        y = rng.random(count) < 1 / (1 + np.exp(0.5 - X @ slopes))
        table = {name: X[:, column] for column, name in enumerate(columns(features))}
        table["y"] = y.astype(np.int8)
        pq.write_table(
            pa.table(table), folder / f"{number:04}.parquet",
            row_group_size=FILE_ROWS, use_dictionary=False, compression="none",
        )  # fmt: skip


def read_files(folder: Path, features: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Covariates, with an intercept before them, and outcomes of one file after the other."""
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path)
        X = np.empty((len(table), features + 1), dtype=np.float64)
        X[:, 0] = 1
        for column, name in enumerate(columns(features), start=1):
            X[:, column] = table[name].to_numpy()
        yield X, table["y"].to_numpy().astype(np.float64)


def nearest_gaussian(folder: Path, features: int, copies: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Mode and standard deviations of the Laplace approximation, by Newton's method on all rows.

    Each row counts `copies` times.
    """
    mode, prior = np.zeros(features + 1), np.eye(features + 1) / PRIOR_SD**2
    for _ in range(NEWTON_STEPS):
        slope, curvature = -prior @ mode, prior.copy()
        for X, y in read_files(folder, features):
            mean = 1 / (1 + np.exp(-X @ mode))
            slope += copies * X.T @ (y - mean)
            curvature += copies * (X * (mean * (1 - mean))[:, None]).T @ X
        change = np.linalg.solve(curvature, slope)
        mode = mode + change
        if change @ curvature @ change < 1e-8:
            return mode, np.sqrt(np.diag(np.linalg.inv(curvature)))
    raise RuntimeError(f"Newton's method did not end in {NEWTON_STEPS} steps.")
