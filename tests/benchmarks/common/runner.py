"""How a benchmark runs: options, one core, fresh processes, a file of results, and tables.

A program calls `run` with a generator of results, each a dictionary that JSON allows, and with the
columns of its tables; a measurement that needs a process of its own is a function that it gives
`fresh`. Python alone is needed here, so that peers' interpreters can import it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from common.markdown import PACKAGES, cpu_name, markdown_table, version, write_tables

BENCHMARKS = Path(__file__).resolve().parents[1]
REPOSITORY = BENCHMARKS.parents[1]
STORAGE = REPOSITORY / ".benchmarks"
"""Folder of the environments of peers and of data on their way, which git ignores."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
    "VECLIB_MAXIMUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
}
"""Environment variables which hold the numerical libraries to one thread each."""

Result = dict[str, Any]


class Table(NamedTuple):
    """Columns, each an entry of the results or a function of one, of the results that are shown."""

    title: str
    columns: Mapping[str, str | Callable[[Result], Any]]
    shown: Callable[[Result], bool] = lambda _: True

    def rows(self, results: Iterable[Result]) -> list[list[Any]]:
        """Cells, empty where a result has no such entry."""
        return [
            [
                one.get(get, "") if isinstance(get, str) else get(one)
                for get in self.columns.values()
            ]
            for one in filter(self.shown, results)
        ]


class Verdict(NamedTuple):
    """A figure that should not be above its limit."""

    what: str
    figure: float
    limit: float
    unit: str = ""


def run(
    documentation: str | None,
    results: Callable[[argparse.Namespace], Iterator[Result]],
    tables: Sequence[Table] | Callable[[list[Result]], Sequence[Table]],
    options: Mapping[str, tuple[Any, ...]],
    verdicts: Callable[[list[Result]], Iterable[Verdict]] = lambda _: (),
    *,
    one_core: bool = True,
    merged: Sequence[str] = (),
) -> int:
    """Run a benchmark; 1 if a figure is over its limit.

    Parameters
    ----------
    documentation : str
        Of the program; its first line is shown as help.
    results : callable
        A generator of results, of the options. ``settings.stored`` are those of the file.
    tables : sequence of Table, or a function of the results
        They are printed, and written where ``--markdown`` says. Titles may name options in braces.
    options : dict
        The default of each option, and its help or the choices, a tuple. Defaults that are tuples
        take several values.
    verdicts : callable
        Figures with limits, of all results.
    one_core : bool
        Hold this process, and those that it starts, to one core.
    merged : sequence of str
        Entries that name a result, of a program whose runs with the same ``--output`` are merged.
    """
    settings = parse_arguments(documentation, options)
    core = restrict_to_one_core(settings.core) if one_core else None
    found: list[Result] = []
    if merged and settings.output is not None and settings.output.exists():
        found = json.loads(settings.output.read_text())["results"]
    settings.stored = found
    for result in results(settings):
        say(json.dumps(result))
        found[:] = [one for one in found if not _same(one, result, merged)]
        found.append(result)
        write_results(settings, core, found)
    shown = []
    for table in tables(found) if callable(tables) else tables:
        rows = table.rows(found)
        if rows:
            print(f"\n{table.title.format(**vars(settings))}\n")
            print(markdown_table(list(table.columns), rows))
            shown.append((list(table.columns), rows))
    if settings.markdown is not None:
        write_tables(settings.markdown, shown, command(sys.argv))
    reached = True
    for what, figure, limit, unit in verdicts(found):
        within = figure <= limit  # Not so for nan.
        reached &= within
        state = "reached" if within else "NOT REACHED"
        print(f"{state}: {what} {figure:.3g} {unit}, limit {limit:g}")
    return 0 if reached else 1


def _same(one: Result, other: Result, names: Sequence[str]) -> bool:
    return bool(names) and all(one.get(name) == other.get(name) for name in names)


def parse_arguments(
    documentation: str | None, options: Mapping[str, tuple[Any, ...]]
) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=(documentation or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    shared = {
        "core": (int, "core to run on"),
        "output": (Path, "JSON file for the results"),
        "markdown": (Path, "file for the tables of the documentation"),
    }
    for name, (default, *rest) in {**options, **shared}.items():
        given: dict[str, Any] = {"default": default}
        if isinstance(default, type):  # that of an option without default
            given |= {"default": None, "type": default}
        elif isinstance(default, bool):
            given["action"] = "store_true"
        elif isinstance(default, tuple):
            given |= {"nargs": "*", "default": list(default)}
            given["type"] = type(default[0]) if default else int
        else:
            given["type"] = type(default)
        for one in rest:
            given["choices" if not isinstance(one, str) else "help"] = one
        parser.add_argument(f"--{name.replace('_', '-')}", **given)
    return parser.parse_args()


def command(arguments: Sequence[str]) -> str:
    """The command of this run, without the options that say where results go."""
    words, kept = list(arguments[1:]), [f"tests/benchmarks/{Path(arguments[0]).name}"]
    while words:
        word = words.pop(0)
        if word in ("--core", "--output", "--markdown"):
            words.pop(0)
        else:
            kept.append(word)
    return " ".join(kept)


def say(text: str) -> None:
    """Tell of progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def write_results(settings: argparse.Namespace, core: int | None, results: list[Result]) -> None:
    """Write everything that is needed to read the figures later, where a file was asked for."""
    if settings.output is None:
        return
    facts = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "core_used": core,
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    document = {
        "benchmark": command(sys.argv),
        "machine": facts,
        "settings": {name: value for name, value in vars(settings).items() if name != "stored"},
        "versions": {package: version(package) for package in PACKAGES},
        "results": results,
    }
    settings.output.parent.mkdir(parents=True, exist_ok=True)
    settings.output.write_text(json.dumps(document, indent=1, default=str) + "\n")


def restrict_to_one_core(core: int | None = None) -> int | None:
    """Hold this process, and those which it starts, to one core, the last one allowed by default.

    Must be called before NumPy is imported: the libraries read the variables when they load. The
    value is the core, None where the operating system cannot pin a process.
    """
    os.environ.update(ONE_THREAD)
    # The variables alone leave XLA's own thread pool as large as the machine; it is sized by the
    # cores which the process may use.
    if not hasattr(os, "sched_setaffinity"):
        return None
    core = max(os.sched_getaffinity(0)) if core is None else core
    os.sched_setaffinity(0, {core})
    return core


# --- Fresh processes -----------------------------------------------------------------------------


def fresh(
    function: Callable[..., Any],
    *,
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
    limit: float | None = None,
    **arguments: Any,
) -> Any:
    """Call a function in a new Python process and return its value.

    Parameters
    ----------
    function : callable
        One of a module in ``tests/benchmarks``. A function with the argument ``launched`` receives
        the time at which the process was started, as `time.time` counts.
    environment : dict, optional
        Environment variables to set beside this process's own.
    python : str
        Interpreter, this process's own by default.
    limit : float, optional
        Seconds after which the process is ended.
    **arguments
        Of the function, as JSON allows, as is its value.

    Raises
    ------
    RuntimeError
        The process failed; the message ends with its output.
    subprocess.TimeoutExpired
        It was ended at the limit.
    """
    code = function.__code__
    module = Path(code.co_filename).resolve().relative_to(BENCHMARKS).with_suffix("")
    name = f"{'.'.join(module.parts)}:{function.__name__}"
    if "launched" in code.co_varnames[: code.co_argcount]:
        arguments["launched"] = time.time()
    # Installed packages have bytecode, so this one should not be compiled in each process.
    inherited = {key: os.environ[key] for key in os.environ if key != "PYTHONDONTWRITEBYTECODE"}
    paths = os.pathsep.join([str(BENCHMARKS), str(REPOSITORY)])
    finished = subprocess.run(
        [python, "-m", "common.runner", name],
        input=json.dumps(arguments),
        capture_output=True,
        text=True,
        cwd=BENCHMARKS,
        timeout=limit,
        env={**inherited, "PYTHONPATH": paths, **(environment or {})},
    )
    if finished.returncode:
        raise RuntimeError(f"{name} failed:\n{finished.stderr[-3000:]}")
    return json.loads(finished.stdout.splitlines()[-1])


def attempt(function: Callable[..., Any], **arguments: Any) -> Any:
    """As `fresh`; None, with the reason on standard error, where there is no value."""
    try:
        return fresh(function, **arguments)
    except subprocess.TimeoutExpired as error:
        say(f"{function.__name__} did not end within {error.timeout:g} seconds")
    except RuntimeError as error:
        say(str(error))
    return None


def cold_and_warm(function: Callable[..., Any], **arguments: Any) -> tuple[Any, Any]:
    """Values of two processes, the first with empty compile caches, which the second one reads."""
    with tempfile.TemporaryDirectory(prefix="benchmark-cache-") as caches:
        arguments["environment"] = cache_variables(caches) | arguments.get("environment", {})
        return fresh(function, **arguments), fresh(function, **arguments)


def cache_variables(folder: str | Path) -> dict[str, str]:
    """Environment variables that give a process compile caches of its own, for `fresh`."""
    return {
        "PYTENSOR_FLAGS": f"base_compiledir={folder}",
        "NUMBA_CACHE_DIR": f"{folder}/numba",
        "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder, on the disk of the repository, that goes at the end."""
    STORAGE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=STORAGE) as folder:
        yield Path(folder)


def _serve() -> None:
    """Call the function named by the first argument; what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    function = getattr(importlib.import_module(module), name)
    print(json.dumps(function(**json.load(sys.stdin))), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
