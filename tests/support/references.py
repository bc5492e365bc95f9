"""Stored reference values."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of a file of NumPy, which is closed again."""
    with np.load(path) as file:
        return dict(file)
