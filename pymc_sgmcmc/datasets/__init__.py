"""Public data sets for examples, tests and benchmarks.

No data ship with the package. A loader looks for its file in this order:

1. the folder given as ``data_home``;
2. the folder named by the environment variable ``PYMC_SGMCMC_DATA``;
3. the cache that pooch keeps for this package, ``pooch.os_cache("pymc_sgmcmc")``;
4. the official home of the data, from which the file is downloaded into that cache.

A folder may hold the file as it was downloaded, unpacked, or converted (``.npz``, with the arrays X
and y), under the names that the docstring of the loader lists. Nothing is ever written to a folder.
`Dataset.origin` says where the rows came from. `load_randhie` and `load_fair` read tables that are
part of statsmodels and need neither folder nor network.

Downloads are checked by their hash, or `load_skin` by that of the values. No hash of the files of
`load_covertype` and `load_cod_rna` is known: a download of them gives a warning.

Downloads need pooch, `load_cod_rna` needs scikit-learn, and the two tables need statsmodels:
``pip install "pymc_sgmcmc[datasets]"``.
"""

from pymc_sgmcmc.datasets.dataset import Corpus, Dataset, DatasetUnavailableError
from pymc_sgmcmc.datasets.loaders import (
    load_ap,
    load_cbpp,
    load_cod_rna,
    load_contraception,
    load_covertype,
    load_epil,
    load_fair,
    load_movielens,
    load_randhie,
    load_run_or_walk,
    load_salamander,
    load_skin,
    load_sleepstudy,
)

__all__ = [
    "Corpus",
    "Dataset",
    "DatasetUnavailableError",
    "load_ap",
    "load_cbpp",
    "load_cod_rna",
    "load_contraception",
    "load_covertype",
    "load_epil",
    "load_fair",
    "load_movielens",
    "load_randhie",
    "load_run_or_walk",
    "load_salamander",
    "load_skin",
    "load_sleepstudy",
]
