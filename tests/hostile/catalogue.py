"""All cases: to import this is to have them in `tests.hostile.case.CASES`."""

from __future__ import annotations

import importlib

MODULES = ("settings", "models", "data", "changes", "runs", "traces", "cli")

for _name in MODULES:
    importlib.import_module(f"tests.hostile.{_name}")
