"""The near side of the protocol: a worker process seen as an object."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
REPOSITORY = BENCHMARKS.parents[1]


class WorkerError(RuntimeError):
    """A worker answered with an error, ended, or took too long.

    Attributes
    ----------
    unavailable : bool
        The contender cannot take part here (a package is missing), as opposed to a failure.
    """

    def __init__(self, message: str, *, unavailable: bool = False) -> None:
        super().__init__(message)
        self.unavailable = unavailable


class WorkerProcess:
    """A contender in a process of its own.

    Parameters
    ----------
    contender : str
        Name of the contender.
    python : Path
        Interpreter which runs it.
    own_environment : bool
        The interpreter belongs to the peer alone: the repository is then kept off its path.
    timeout : float
        Seconds within which every request must be answered.
    log : Path
        File to which the worker's own output goes.
    """

    def __init__(
        self, contender: str, python: Path, *, own_environment: bool, timeout: float, log: Path
    ) -> None:
        self.contender = contender
        self._timeout = timeout
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(python), "-m", "transition_benchmark.worker", contender],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd=log.parent,
                env=_environment(own_environment),
            )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises
        ------
        WorkerError
            The worker reports an error, has ended, or does not answer in time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        watchdog = threading.Timer(self._timeout, self._process.kill)
        watchdog.start()
        try:
            print(
                json.dumps({"command": command, **arguments}), file=self._process.stdin, flush=True
            )
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            expired = not watchdog.is_alive()
            watchdog.cancel()
        if not line:
            reason = f"did not answer within {self._timeout:g} s" if expired else "has ended"
            raise WorkerError(f"the worker {reason}; the end of its output:\n{self._log_tail()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"], unavailable=answer["unavailable"])
        return answer

    def close(self) -> None:
        """Stop the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write('{"command": "stop"}\n')
            self._process.stdin.close()
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        except BrokenPipeError:
            pass  # it has ended already
        self._process.stdout.close()
        self._process.wait()

    def _log_tail(self, lines: int = 15) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def _environment(own_environment: bool) -> dict[str, str]:
    paths = [BENCHMARKS] if own_environment else [BENCHMARKS, REPOSITORY]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, paths)))
    if own_environment:
        for name in ("PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"):
            environment.pop(name, None)
    return environment
