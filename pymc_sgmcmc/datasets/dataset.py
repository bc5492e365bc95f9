"""The data set that `load` returns, and the error when it cannot find the data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd


class DatasetUnavailableError(FileNotFoundError):
    """A data set is in no folder that was searched and could not be downloaded."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Dataset:
    """A table, with its description, source and licence.

    Attributes
    ----------
    name : str
        Short name. Where only a part or a sample was read, the name says which.
    frame : pandas.DataFrame
        The rows, one column a variable, indexed 0 to ``n_rows - 1``.
    target : str or None
        The column to model, or None where there is none.
    feature_names : tuple of str
        The columns of `X`, in order.
    group_names : tuple of str
        The columns that number the groups of a mixed model.
    description : str
        What a row is, and the coding and the units where they are not obvious.
    source : str
        Where the data are published.
    licence : str
        The terms under which they are published.
    citation : str
        The publication to cite.
    vocabulary : tuple of str
        The words of a corpus, which column ``word`` of the frame counts from 0.
    origin : str
        Where this copy was read from: ``"folder …"``, ``"cache"``, ``"download"`` or
        ``"package statsmodels"``.

    Examples
    --------
    >>> from pymc_sgmcmc.datasets import load
    >>> fair = load("fair")
    >>> fair
    Dataset(name='fair', 6366 rows, target 'affairs', 8 features, origin='package statsmodels')
    >>> fair.X.shape, fair.y.shape
    ((6366, 8), (6366,))
    """

    name: str
    frame: pd.DataFrame
    target: str | None
    feature_names: tuple[str, ...]
    group_names: tuple[str, ...] = ()
    description: str = ""
    source: str = ""
    licence: str = ""
    citation: str = ""
    vocabulary: tuple[str, ...] = ()
    origin: str

    def __repr__(self) -> str:
        """One line, since a printed frame of thousands of rows would hide the rest."""
        return (
            f"{type(self).__name__}(name={self.name!r}, {len(self.frame)} rows, "
            f"target {self.target!r}, {len(self.feature_names)} features, origin={self.origin!r})"
        )

    @property
    def X(self) -> np.ndarray:  # noqa: N802 - matrices are called X, as in the papers
        """Features as a new array, (n_rows, n_features).

        Its type is the smallest that holds every column. Missing values of pandas' nullable types
        become NaN.

        Raises
        ------
        TypeError
            When a feature is not a number.
        """
        features = self.frame[list(self.feature_names)]
        is_numeric = pd.api.types.is_numeric_dtype
        if not_numeric := [name for name, column in features.items() if not is_numeric(column)]:
            raise TypeError(
                f"{self.name}: X needs numeric columns, but {not_numeric} are not numeric. Encode "
                "them first, for example by pandas.get_dummies(dataset.frame)."
            )
        dtypes = list(features.dtypes)
        if all(isinstance(dtype, np.dtype) for dtype in dtypes):
            common = np.result_type(*dtypes)
        else:  # pandas' own nullable numbers: floating point alone can hold a missing value
            common = np.dtype(np.float64)
        # A copy, because pandas gives a read-only view; by rows, because minibatches gather rows.
        return np.array(features.to_numpy(dtype=common), order="C")

    @property
    def y(self) -> np.ndarray:
        """Target as a new array, (n_rows,), in the type of its column.

        Raises
        ------
        ValueError
            When the data set has no target.
        """
        if self.target is None:
            raise ValueError(f"{self.name} has no target column. Use the columns of dataset.frame.")
        return np.array(self.frame[self.target].to_numpy())
