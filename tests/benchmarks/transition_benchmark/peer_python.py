"""A virtual environment for a peer which cannot live beside this package.

SGMCMCJax 0.2.13 imports names that later versions of JAX removed, and the last JAX which it works
with needs older NumPy and SciPy and a Python of at most 3.12.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transition_benchmark.interface import UnavailableError

SGMCMCJAX_REQUIREMENTS = (
    "sgmcmcjax==0.2.13",
    "jax==0.4.30",
    "jaxlib==0.4.30",
    "numpy<2",
    "scipy<1.13",
)
PYTHON_VARIABLE = "PYMC_SGMCMC_PEER_PYTHON"
_VERSIONS = ((3, 12), (3, 11))


def sgmcmcjax_python(storage: Path) -> Path:
    """Interpreter of SGMCMCJax's virtual environment, created at the first call.

    Parameters
    ----------
    storage : Path
        Folder that receives the environment; it is made invisible to git.

    Returns
    -------
    Path
        The environment's interpreter.

    Raises
    ------
    UnavailableError
        No fitting Python was found, or the packages could not be installed.
    """
    mark = hashlib.sha256("\n".join(SGMCMCJAX_REQUIREMENTS).encode()).hexdigest()[:12]
    folder = storage / f"sgmcmcjax-{mark}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    complete = folder / "complete"
    # The mark is written last, so an installation that was broken off is begun anew.
    if complete.exists():
        return python
    base = find_python()
    print(f"creating the environment of SGMCMCJax with {base} ...", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    _run([base, "-m", "venv", str(folder)], "create a virtual environment")
    install = [str(python), "-m", "pip", "install", "--quiet", *SGMCMCJAX_REQUIREMENTS]
    _run(install, "install SGMCMCJax")
    complete.write_text("\n".join(SGMCMCJAX_REQUIREMENTS) + "\n")
    return python


def find_python() -> str:
    """Find a Python which SGMCMCJax's requirements support.

    Looked for in this order: the environment variable ``PYMC_SGMCMC_PEER_PYTHON``, the running
    interpreter, every ``python3.12`` and ``python3.11`` on ``PATH``.

    Raises
    ------
    UnavailableError
        None was found; the message names what was tried.
    """
    wanted = " or ".join(f"{major}.{minor}" for major, minor in _VERSIONS)
    given = os.environ.get(PYTHON_VARIABLE)
    if given:
        version = _version(given)
        if version in _VERSIONS:
            return given
        found = "does not run" if version is None else "is {}.{}".format(*version)
        raise UnavailableError(
            f"{PYTHON_VARIABLE} should name a Python {wanted} but {given!r} {found}"
        )
    tried = []
    for candidate in _candidates():
        version = _version(candidate)
        if version in _VERSIONS:
            return candidate
        tried.append(
            f"{candidate} ({'does not run' if version is None else '{}.{}'.format(*version)})"
        )
    raise UnavailableError(
        f"SGMCMCJax needs a Python {wanted}, and none was found on PATH; "
        f"install one or set {PYTHON_VARIABLE} to its path. Tried: {', '.join(tried)}"
    )


def _candidates() -> Iterator[str]:
    yield sys.executable
    for major, minor in _VERSIONS:
        for folder in os.get_exec_path():
            found = shutil.which(f"python{major}.{minor}", path=folder)
            if found:
                yield found


def _version(python: str) -> tuple[int, int] | None:
    """Version of an interpreter, None if it does not run.

    A name on PATH proves little: a version manager's stand-in exists for versions that are not
    active. It is run outside the repository, whose ``.python-version`` such a stand-in obeys.
    """
    probe = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [python, "-c", probe],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            cwd=tempfile.gettempdir(),
        )
    except (OSError, subprocess.SubprocessError):
        return None
    major, minor = map(int, answer.stdout.split())
    return major, minor


def _run(command: list[str], purpose: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, cwd=tempfile.gettempdir())
    if result.returncode:
        output = (result.stderr or result.stdout)[-2000:]
        raise UnavailableError(f"could not {purpose} ({' '.join(command)}):\n{output}")
