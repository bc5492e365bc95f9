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

from common.runner import REPOSITORY, STORAGE, say

REQUIREMENTS = {
    "sgmcmcjax": ("sgmcmcjax==0.2.13", "jax==0.4.30", "jaxlib==0.4.30", "numpy<2", "scipy<1.13"),
    "extras": ("pymc_extras>=0.15", "pyarrow"),  # It needs an older PyMC than this package.
    "package": (str(REPOSITORY),),
    "nutpie": ("nutpie",),
    "others": ("nutpie", "blackjax", "numpyro"),
}
"""What is installed for peers, by environment; "nutpie" lies in that of the others."""
OF_THE_PACKAGE = ("ours", "sample", "corrected", "euler", "euler_fine", "advi", "ours_long", "psis")
"""Contenders in an environment with the package and what it needs. Where JAX and Dask are installed
too, ArviZ and xarray import them."""
PYTHON_VARIABLE = "PYMC_SGMCMC_PEER_PYTHON"


def python_of(contender: str) -> str:
    """Interpreter of a contender, in a virtual environment that is made at the first call.

    Raises
    ------
    RuntimeError
        No fitting Python was found, or the packages could not be installed.
    """
    if contender == "numba":
        return sys.executable
    kind = {"pymc_extras": "extras"}.get(contender, contender)
    if contender in OF_THE_PACKAGE:
        kind = "package"
    kind = kind if kind in REQUIREMENTS else "others"
    requirements: Sequence[str] = REQUIREMENTS[kind]
    folder = STORAGE / ("others" if kind == "nutpie" else kind)
    if folder.name == "others":
        requirements = (f"pymc=={metadata.version('pymc')}", *requirements)
    python = str(folder / "bin" / "python")
    names = [part.partition("=")[0].partition("<")[0].partition(">")[0] for part in requirements]
    names = ["pymc_sgmcmc" if kind == "package" else name for name in names]
    probe = f"from importlib.metadata import version\nfor name in {names!r}: version(name)"
    if not (folder / "bin" / "python").exists():
        base = _old_python() if kind == "sgmcmcjax" else sys.executable
        say(f"creating the environment {folder} with {base} ...")
        _run(base, "-m", "venv", str(folder))
    try:
        _run(python, "-c", probe)
    except RuntimeError:
        _run(python, "-m", "pip", "install", "--quiet", *requirements)
    return python


def python_path(contender: str) -> dict[str, str]:
    """``PYTHONPATH`` of a contender: a peer's interpreter is kept off what this environment has."""
    paths = [str(REPOSITORY / "tests" / "benchmarks")]
    if contender in ("numba", *OF_THE_PACKAGE):
        paths += filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(paths)}


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
