"""Virtual environments for the peers, none of which this package needs, and for the package alone.

SGMCMCJax 0.2.13 imports names that later versions of JAX removed, and the last JAX which it works
with needs older NumPy and SciPy and a Python of at most 3.12. It has an environment of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata

from common.child import REPOSITORY
from common.program import say

STORAGE = REPOSITORY / ".benchmarks"
"""Folder of the environments of peers, which git ignores."""
SGMCMCJAX = ("sgmcmcjax==0.2.13", "jax==0.4.30", "jaxlib==0.4.30", "numpy<2", "scipy<1.13")
OTHERS = ("blackjax", "numpyro", "nutpie")
EXTRAS = ("pymc_extras>=0.15", "pyarrow")
"""It needs an older PyMC than this package."""
PYTHON_VARIABLE = "PYMC_SGMCMC_PEER_PYTHON"
OF_THE_PACKAGE = ("ours", "sample", "corrected", "euler", "euler_fine", "advi")
"""Contenders in an environment with the package and what it needs. Where JAX and Dask are installed
too, ArviZ and xarray import them."""
OF_THIS_ENVIRONMENT = ("numba",)
"""Contenders in the environment that runs the benchmark."""


def python_of(contender: str) -> str:
    """Interpreter of a contender, in a virtual environment that is made at the first call.

    Raises
    ------
    RuntimeError
        No fitting Python was found, or the packages could not be installed.
    """
    if contender in OF_THIS_ENVIRONMENT:
        return sys.executable
    if contender in OF_THE_PACKAGE:
        return _environment("package", (str(REPOSITORY),))
    if contender == "sgmcmcjax":
        return _environment("sgmcmcjax", SGMCMCJAX)
    if contender == "pymc_extras":
        return _environment("extras", EXTRAS)
    return _environment("others", (f"pymc=={metadata.version('pymc')}", *OTHERS))


def python_path(contender: str) -> str:
    """``PYTHONPATH`` of a contender: a peer's interpreter is kept off what this environment has."""
    if contender not in OF_THIS_ENVIRONMENT + OF_THE_PACKAGE:
        return ""
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))


def _environment(name: str, requirements: Sequence[str]) -> str:
    """Make the environment, unless it is there with the same packages."""
    folder = STORAGE / name
    python = str(folder / "bin" / "python")
    complete = folder / "complete"
    # Written last: an installation that was broken off, or has other packages, is begun anew.
    if not complete.exists() or complete.read_text() != str(requirements):
        base = _old_python() if name == "sgmcmcjax" else sys.executable
        say(f"creating the environment {folder} with {base} ...")
        _run(base, "-m", "venv", "--clear", str(folder))
        _run(python, "-m", "pip", "install", "--quiet", *requirements)
        complete.write_text(str(requirements))
    return python


def _old_python() -> str:
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
