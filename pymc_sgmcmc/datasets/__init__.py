"""Public data sets for examples, tests and benchmarks: ``load(name)``.

- ``"randhie"``, ``"fair"``: visits to a doctor, and affairs; tables inside statsmodels, which need
  neither folder nor network;
- ``"skin"``, ``"covertype"``, ``"cod-rna-train"``, ``"cod-rna-test"``, ``"run-or-walk"``:
  classification, and ``"covertype-16pct"``, a sample;
- ``"sleepstudy"``, ``"cbpp"``, ``"contraception"``, ``"epil"``, ``"salamander"``: mixed models;
- ``"movielens-100k"``, ``"movielens-1m"``: ratings, **which may not be redistributed**; GroupLens
  allows their use for research and asks for acknowledgement;
- ``"ap"``: word counts of news reports.

The dataset says what a row is, its source, licence and citation. No data ship with the package. A
file is looked for in this order:

1. the folder given as ``data_home``;
2. the folder named by the environment variable ``PYMC_SGMCMC_DATA``;
3. the cache that pooch keeps for this package, ``pooch.os_cache("pymc_sgmcmc")``;
4. the official home of the data, from which the file is downloaded into that cache.

A folder may hold the file as it was downloaded, unpacked, or converted (``.npz``), under the names
that ``registry.toml`` lists. Nothing is ever written to a folder. Downloads are checked by their
hash, or ``"skin"`` by that of the values. No hash is known of the files of ``"covertype"`` and
``"cod-rna-…"``: a download of them gives a warning.

Downloads need pooch, ``"cod-rna-…"`` needs scikit-learn, and the first two tables need statsmodels:
``pip install "pymc_sgmcmc[datasets]"``.
"""

from pymc_sgmcmc.datasets.dataset import Dataset, DatasetUnavailableError
from pymc_sgmcmc.datasets.fetch import load

__all__ = ["Dataset", "DatasetUnavailableError", "load"]
