"""Tables for mixed models, from R packages through Rdatasets."""

from __future__ import annotations

import os

from pymc_sgmcmc.datasets.dataset import Dataset
from pymc_sgmcmc.datasets.documentation import documented
from pymc_sgmcmc.datasets.fetch import load


@documented("sleepstudy")
def load_sleepstudy(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Reaction times of 18 subjects over ten days of sleep deprivation.

    Returns
    -------
    Dataset
        180 rows: Reaction (the target), Days, Subject (the group).

    Examples
    --------
    >>> load_sleepstudy().frame["Subject"].nunique()  # doctest: +SKIP
    18
    """
    return load("sleepstudy", data_home)


@documented("cbpp")
def load_cbpp(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Cases of contagious bovine pleuropneumonia in 15 herds over four periods.

    Returns
    -------
    Dataset
        56 rows: incidence (the target), size (at the start of the period: the number of trials of
        a binomial model), period (1 to 4, a category), herd (the group, 1 to 15).

    Examples
    --------
    >>> load_cbpp().frame[["incidence", "size"]].sum().tolist()  # doctest: +SKIP
    [99, 842]
    """
    return load("cbpp", data_home)


@documented("contraception")
def load_contraception(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Use of contraception by 1934 women in 60 districts of Bangladesh.

    Returns
    -------
    Dataset
        1934 rows: woman (a number), district (the group), use (the target), livch (living
        children, ordered categories "0", "1", "2", "3+"), age, urban. The file has Y and N for
        use and urban. Encode livch before you use ``X``.

    Examples
    --------
    >>> load_contraception().y.mean()  # doctest: +SKIP
    0.392
    """
    return load("contraception", data_home)


@documented("epil")
def load_epil(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Seizures of 59 epileptics over four periods of two weeks.

    Returns
    -------
    Dataset
        236 rows: y (the target), trt (categories "placebo" and "progabide"), base, age, V4,
        subject (the group, 1 to 59), period, lbase and lage. Encode trt before you use ``X``.

    Examples
    --------
    >>> load_epil().frame["subject"].nunique()  # doctest: +SKIP
    59
    """
    return load("epil", data_home)


@documented("salamander")
def load_salamander(data_home: str | os.PathLike[str] | None = None) -> Dataset:
    """Mating of salamanders of two populations: two crossed groups, 60 males and 60 females.

    Returns
    -------
    Dataset
        360 rows: Season (categories "Fall" and "Summer"), Experiment (1 to 3), TypeM and TypeF
        (categories "R" and "W"), Cross (categories "RR", "RW", "WR", "WW"), Male and Female (the
        groups, 1 to 60 each), Mate (the target). The first letter of Cross is the type of the
        female. Encode the categories before you use ``X``.

    Examples
    --------
    >>> load_salamander().frame["Cross"].value_counts().tolist()  # doctest: +SKIP
    [90, 90, 90, 90]
    """
    return load("salamander", data_home)
