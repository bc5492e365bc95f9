"""A virtual environment for SGMCMCJax, which cannot live beside this package.

SGMCMCJax 0.2.13 imports names that later versions of JAX removed, and the last JAX which it works
with needs older NumPy and SciPy and a Python of at most 3.12.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from common.program import say

REQUIREMENTS = ("sgmcmcjax==0.2.13", "jax==0.4.30", "jaxlib==0.4.30", "numpy<2", "scipy<1.13")
PYTHON_VARIABLE = "PYMC_SGMCMC_PEER_PYTHON"


def sgmcmcjax_python(storage: Path) -> Path:
    """Interpreter of SGMCMCJax's virtual environment in a folder, created at the first call.

    Raises
    ------
    RuntimeError
        No fitting Python was found, or the packages could not be installed.
    """
    folder = storage / "sgmcmcjax"
    python = folder / "bin" / "python"
    complete = folder / "complete"
    # Written last: an installation that was broken off, or has other packages, is begun anew.
    if not complete.exists() or complete.read_text() != str(REQUIREMENTS):
        base = _find_python()
        say(f"creating the environment of SGMCMCJax with {base} ...")
        _run(base, "-m", "venv", "--clear", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS)
        complete.write_text(str(REQUIREMENTS))
    return python


def _find_python() -> str:
    """Find a Python 3.12 or 3.11: the one given, the running one, those on ``PATH``."""
    given = os.environ.get(PYTHON_VARIABLE)
    usual = (sys.executable, shutil.which("python3.12"), shutil.which("python3.11"))
    candidates = [given] if given else [python for python in usual if python is not None]
    probe = "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 11)))"
    for python in candidates:
        # A name on PATH proves little: a version manager has stand-ins for versions that are not
        # active.
        try:
            _run(python, "-c", probe)
        except (OSError, RuntimeError):
            continue
        return python
    raise RuntimeError(
        f"SGMCMCJax needs a Python 3.12 or 3.11, but tried {', '.join(candidates)}. "
        f"Install one, or set {PYTHON_VARIABLE} to its path."
    )


def _run(*command: str) -> None:
    # Outside the repository, whose ``.python-version`` a version manager would obey.
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir())
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {(ended.stderr or ended.stdout)[-2000:]}")
