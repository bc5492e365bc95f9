"""Fixtures of the tests of compilation."""

from tests.posterior.conftest import without_compiler as without_compiler
