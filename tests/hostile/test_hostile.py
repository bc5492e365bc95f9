"""Bad inputs and planted faults end in a clear message, or in draws of the full-data posterior."""

from __future__ import annotations

import pytest

import tests.hostile.catalogue  # noqa: F401  # fills the catalogue
from tests.hostile.case import CASES, Case, judge

QUICK = ("settings.", "traces.", "cli.")
"""Subjects of the default run: those of the others compile a function each, and models, rows and
changes of them have tests of their own."""


def is_slow(case: Case) -> bool:
    """Whether a case is left out of the default run."""
    return case.slow or not case.name.startswith(QUICK)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(entry, id=name, marks=[pytest.mark.slow] if is_slow(entry) else [])
        for name, entry in CASES.items()
    ],
)
def test_no_wrong_answer_without_a_word(case: Case):
    verdict = judge(case)
    assert verdict.good, f"{verdict.word}: {verdict.text}"


def test_catalogue_is_large():
    assert len(CASES) >= 160
