"""Run the first example of README.md with the installed package, not with that of the clone."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def first_example() -> str:
    """Code of the first block of Python in the README."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1]


if __name__ == "__main__":
    import pymc_sgmcmc

    installed = Path(pymc_sgmcmc.__file__).resolve()
    if ROOT.resolve() in installed.parents:
        raise SystemExit(f"pymc_sgmcmc should be an installed wheel, but is {installed.parent}")
    exec(compile(first_example(), "README.md", "exec"), {"__name__": "__main__"})
