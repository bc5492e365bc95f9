"""The store of a run: draws and states of chains on disk, from which a run goes on exactly.

A store is a folder. Each chain has a folder of its own, to which only the process of the chain
writes: *blocks* of draws, the *states* of the chain after the last two of them, and a *commit* for
each block, with the checksums of its files. Blocks, states and set-up are zip files of zarr 3. Each
file is written under another name, and gets its name when all of it is on the disk. A block counts
when its commit is there and all checksums are right. So the end of a process, whenever it comes,
costs no more than the draws since the last commit, and these are the same when drawn again.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from pymc.stats.convergence import SamplerWarning, WarningType

from pymc_sgmcmc.chain import ChainState
from pymc_sgmcmc.checks import truth_value
from pymc_sgmcmc.errors import StoreError
from pymc_sgmcmc.record import RECORD, RunRecord, RunSettings
from pymc_sgmcmc.sampling.encode import decode, encode
from pymc_sgmcmc.sampling.zarr_file import check_zarr, group_metadata, packed, unpacked
from pymc_sgmcmc.step_methods.base import StochasticGradientStep

FORMAT = 1
"""Stores of another format cannot be read."""

SECONDS_A_BLOCK = 2.0
"""A block has the draws of at least this time, since writing it takes some hundredths of a
second."""

SHARE_A_BLOCK = 0.01
"""A block has the draws of at least this part of the time of the chain so far. A run of a day then
has some thousand blocks and no more, and the end of a process costs this part of its time."""

SHARE_OF_WRITING = 0.05
"""At most this part of the time goes into writing, also where the state of a chain is large."""

SECONDS_TO_WAIT = 10.0
"""A process whose parent has ended ends after its present run of draws, and holds a lock until
then. After this time a store is said to be in use."""

HEADER, SETUP, LOCK, OWNER = "zarr.json", "setup.zip", "lock", "owner.json"
"""The files of a store beside the folders of its chains."""

MARK = "pymc_sgmcmc_store"
"""This attribute of a store has its format."""

Run = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]
"""Values of the value variables and statistics, of one or more draws."""


# --- Files ----------------------------------------------------------------------------------


def write_file(path: Path, content: bytes) -> None:
    """Write a file that is there as a whole or not at all, whenever the process or machine stops.

    Raises
    ------
    OSError
        Where the disk is full, for example. A file of this name is then as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        _replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # It takes space.
        raise
    _sync_folder(path.parent)


def _replace(temporary: Path, path: Path, *, is_waiting: bool = os.name == "nt") -> None:
    """Put a file in the place of another. Windows refuses it while somebody reads the other one."""
    begin = time.monotonic()
    while True:
        try:
            temporary.replace(path)
            return
        except PermissionError:
            if not is_waiting or time.monotonic() - begin > SECONDS_TO_WAIT:
                raise
            time.sleep(0.01)


def _sync_folder(folder: Path) -> None:
    """Write the names of the files of a folder to the disk, where the system can."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _explained(error: OSError, message: str) -> OSError:
    """The error of a disk that is full, for example, which says how to go on."""
    advice = "Make space, or mend what is wrong, and call `sample` again with `resume=True`."
    return OSError(error.errno, f"{error.strerror or error}. {message} {advice}")


def _bytes(path: Path) -> bytes:
    """The bytes of a file. Reading what is no file, such as a named pipe, would wait for ever.

    Raises
    ------
    OSError
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no file")
    return path.read_bytes()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Say that a store is damaged where something else than what was written is found in it.

    Raises
    ------
    StoreError
    """
    try:
        yield
    except StoreError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OSError, RecursionError) as error:
        raise StoreError(
            f"The store {path} is damaged: {type(error).__name__} {error}. Draws that cannot be "
            "read are lost: give another path, and sample again."
        ) from error


def _checksum(content: bytes) -> str:
    return sha256(content).hexdigest()


@contextmanager
def _locked(folder: Path, store: Path) -> Iterator[None]:
    """Hold the lock of a folder, which the system takes from a process that ends."""
    lock = folder / LOCK
    if lock.exists() and not lock.is_file():
        raise StoreError(f"The lock {lock} of a store should be a file. Remove what is there.")
    try:
        with FileLock(lock).acquire(SECONDS_TO_WAIT):
            yield
    except Timeout:
        raise StoreError(
            f"The store {store} is in use{_owner(store)}. Wait until that run has ended, or give "
            "another path."
        ) from None


def _owner(store: Path) -> str:
    try:
        owner = json.loads(_bytes(store / OWNER))
        return f" by the process {owner['process']} on {owner['machine']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


# --- One chain ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Commit:
    """The record that makes a block count.

    Attributes
    ----------
    number : int
    first, last : int
        Draws of the chain before and after the block.
    block, state : str
        Checksums of the files. The last block of a chain that has ended has no state.
    ends : bool
        Whether the chain ends with this block.
    """

    number: int
    first: int
    last: int
    block: str
    state: str
    ends: bool

    @property
    def content(self) -> bytes:
        """The file, with a checksum of its own."""
        record = asdict(self)
        own = _checksum(json.dumps(record, sort_keys=True).encode())
        return json.dumps({**record, "checksum": own}, indent=1, sort_keys=True).encode()

    @classmethod
    def read(cls, path: Path) -> Commit | None:
        """The commit in a file, None where it is torn or there is none."""
        try:
            record = cls(**{k: v for k, v in json.loads(_bytes(path)).items() if k != "checksum"})
            return record if _bytes(path) == record.content else None
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None


@dataclass(frozen=True)
class ChainStore:
    """The part of a store that has one chain, and the place in it from which the chain goes on.

    Attributes
    ----------
    path : Path
        The whole store.
    chain : int
    commits : tuple of Commit
        Commits of the blocks that are whole.
    kept : int
        Draws in all blocks that are whole, also those after the place.
    """

    path: Path
    chain: int
    commits: tuple[Commit, ...] = ()
    kept: int = 0

    @property
    def folder(self) -> Path:
        """The folder of the chain."""
        return self.path / f"chain_{self.chain}"

    @property
    def done(self) -> int:
        """Draws in the blocks."""
        return self.commits[-1].last if self.commits else 0

    def file(self, kind: str, commit: Commit) -> Path:
        """The file of a block or of a state. Another block of this number has another name."""
        checksum = getattr(commit, kind)
        return self.folder / f"{kind}_{commit.number:05d}_{checksum[:8]}.zip"

    def _is_whole(self, kind: str, commit: Commit) -> bool:
        try:
            return _checksum(_bytes(self.file(kind, commit))) == getattr(commit, kind)
        except OSError:  # The last block of a chain has no state.
            return False

    def whole(self) -> ChainStore:
        """The same with all blocks that are whole, up to the first that is not."""
        commits: list[Commit] = []
        for number in count():
            commit = Commit.read(self.folder / f"commit_{number:05d}.json")
            done = commits[-1].last if commits else 0
            if (
                commit is None
                or (commit.number, commit.first) != (number, done)
                or not self._is_whole("block", commit)
            ):
                break
            commits.append(commit)
        return replace(self, commits=tuple(commits), kept=commits[-1].last if commits else 0)

    def resumable(self, total: int) -> ChainStore:
        """The same up to the last block from which the chain can go on to so many draws.

        A longer run would not have ended a run of transitions where a shorter one ends, and would
        have added up its moments in another order. So the last block is drawn again.
        """
        if self.done == total:
            return self
        for number in range(len(self.commits), 0, -1):
            commit = self.commits[number - 1]
            if commit.state and self._is_whole("state", commit):
                return replace(self, commits=self.commits[:number])
        return replace(self, commits=())

    # --- Reading ---

    def draws(self, settings: RunSettings) -> list[Run]:
        """The blocks, with the records of the run in the statistics."""
        return [
            _run_of_block(*unpacked(self.file("block", commit)), settings)
            for commit in self.commits
        ]

    def moments(self) -> RunRecord | None:
        """The record of the moments so far, where the last block does not have it."""
        # A process that goes on writing removes states.
        if not self.commits or not self._is_whole("state", self.commits[-1]):
            return None
        content = _content(self.file("state", self.commits[-1]))
        return None if content["moments"] is None else RunRecord(moments=content["moments"])

    def _state(self) -> ChainState | None:
        if not self.commits:
            return None
        return ChainState(**_content(self.file("state", self.commits[-1]))["state"])

    # --- Writing ---

    def runs(
        self,
        step: StochasticGradientStep,
        rng: np.random.Generator,
        point: dict[str, np.ndarray],
        tune: int,
        draws: int,
    ) -> Iterator[Run]:
        """Runs of draws from where the blocks end, which are written in further blocks.

        Raises
        ------
        OSError
            Where a block cannot be written.
        StoreError
            Where another process writes.
        """
        with _locked(self.folder, self.path):
            for file in self.folder.glob(".*.tmp"):  # of processes that ended
                file.unlink()
            store, state = self, self._state()
            waiting: list[Run] = []
            done, began, committed, writing = self.done, time.monotonic(), 0.0, 0.0
            for run in step.runs(rng, point, tune, draws, state):
                waiting.append(run)
                done += len(run[1]["position"])
                # After a run that failed, the state of the chain is that before it.
                between = step.chain.snapshot.draws == done
                elapsed = time.monotonic() - began
                pause = max(SECONDS_A_BLOCK, SHARE_A_BLOCK * elapsed, writing / SHARE_OF_WRITING)
                ends = done == tune + draws
                # Blocks that are drawn again are kept until there are as many draws.
                between = between and done >= self.kept
                if ends or (between and elapsed - committed >= pause):
                    store = store._committed(step, waiting, done, ends)
                    waiting = []
                    committed = time.monotonic() - began
                    writing = committed - elapsed
                try:
                    yield run
                except GeneratorExit:  # The chain is stopped here.
                    if waiting and between:
                        store._committed(step, waiting, done, ends)
                    raise

    def _committed(
        self, step: StochasticGradientStep, runs: Sequence[Run], done: int, ends: bool
    ) -> ChainStore:
        """The store after a further block."""
        number = len(self.commits)
        block = _block_of_runs(runs)
        state = b"" if ends else _state_of(step)
        commit = Commit(
            number,
            self.done,
            done,
            _checksum(block),
            "" if ends else _checksum(state),
            ends,
        )
        try:
            write_file(self.file("block", commit), block)
            if not ends:
                write_file(self.file("state", commit), state)
            write_file(self.folder / f"commit_{number:05d}.json", commit.content)
        except OSError as error:
            raise _explained(
                error,
                f"Chain {self.chain} could not be written to the store {self.path} after "
                f"{self.done} draws, which are whole.",
            ) from error
        self._remove_others(commit)
        return replace(self, commits=(*self.commits, commit))

    def _remove_others(self, commit: Commit) -> None:
        """Remove the files of a block in whose place this one is, and states that are too old."""
        kept = {self.file("block", commit).name, self.file("state", commit).name}
        if self.commits:
            kept.add(self.file("state", self.commits[-1]).name)
        same = self.folder.glob(f"block_{commit.number:05d}_*.zip")
        for path in [*same, *self.folder.glob("state_*.zip")]:
            if path.name not in kept:
                path.unlink(missing_ok=True)


def _content(path: Path) -> Any:
    """The value in a file."""
    arrays, attributes = unpacked(path)
    return decode(attributes["content"], arrays)


def _packed(value: Any, name: str) -> bytes:
    """The bytes of a file with a value."""
    arrays: dict[str, np.ndarray] = {}
    content = encode(value, name, arrays)
    return packed(arrays, {"content": content})


def _state_of(step: StochasticGradientStep) -> bytes:
    """File of the state of the chain that a step method has, and of its moments so far."""
    record = step.last_record()
    moments = None if record is None else record.moments
    return _packed({"state": vars(step.chain.state), "moments": moments}, "chain")


def _block_of_runs(runs: Sequence[Run]) -> bytes:
    """File of draws, with warnings and records as mappings."""
    values, stats = (
        {name: np.concatenate([run[part][name] for run in runs]) for name in runs[0][part]}
        for part in (0, 1)
    )
    warnings = [
        {
            "draw": place,
            "kind": warning.kind.name,
            "message": warning.message,
            "level": warning.level,
            "step": None if warning.step is None else int(warning.step),
        }
        for place, warning in enumerate(stats.pop("warning"))
        if warning is not None
    ]
    records = [
        {
            "draw": place,
            "settings": None if record.settings is None else record.settings.attributes,
            "moments": record.moments,
        }
        for place, record in enumerate(stats.pop(RECORD))
        if record is not None
    ]
    content = {"values": values, "stats": stats, "warnings": warnings, "records": records}
    return _packed(content, "draws")


def _run_of_block(
    arrays: Mapping[str, np.ndarray], attributes: Mapping[str, Any], settings: RunSettings
) -> Run:
    """Draws of a file, with warnings and records as the step method made them."""
    content = decode(attributes["content"], arrays)
    stats = content["stats"]
    for name in ("warning", RECORD):
        stats[name] = np.full(len(stats["position"]), None, dtype=object)
    for warning in content["warnings"]:
        stats["warning"][warning["draw"]] = SamplerWarning(
            WarningType[warning["kind"]], warning["message"], warning["level"], warning["step"]
        )
    for record in content["records"]:
        of_run = None
        if record["settings"] is not None:
            of_run = RunSettings(record["settings"], settings.arrays, settings.labels)
        stats[RECORD][record["draw"]] = RunRecord(of_run, record["moments"])
    return content["values"], stats


# --- The whole store ------------------------------------------------------------------------


def check_path(store: Any, resume: Any) -> Path | None:
    """The path of a store, None where there is none.

    Raises
    ------
    TypeError, ValueError
    FileExistsError
        Where there is something at the path of a new store.
    FileNotFoundError
        Where there is nothing to resume.
    StoreError
        Where something else than a store is to be resumed.
    ImportError
    """
    truth_value("resume", resume)
    if store is None:
        if resume:
            raise ValueError("`resume=True` needs the path of a store. Give it as `store`.")
        return None
    if not isinstance(store, str | os.PathLike) or not os.fspath(store) or "\0" in str(store):
        raise TypeError(f"`store` should be the path of a folder, but got {store!r}.")
    check_zarr()
    path = Path(store).absolute()
    try:
        there = path.exists()
        if not there and not resume and path.parent.is_dir():
            path.mkdir()
            path.rmdir()  # until the run begins
    except OSError as error:
        raise ValueError(
            f"`store` should be a path where a folder can be made, but {path} is not: {error}."
        ) from error
    if resume:
        if not there:
            raise FileNotFoundError(
                f"There is no store at {path}. Leave out `resume` to begin a run there."
            )
        if not has_begun(path) and not _was_being_made(path):
            raise StoreError(
                f"{path} is no store of `sample`, and nothing there was changed. Give the path "
                "of a store, or another one without `resume`."
            )
    elif there:
        raise FileExistsError(
            f"There is something at {path} already. Give `resume=True` to go on with a run that "
            "is stored there, or another path."
        )
    elif not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} for the store. Make it first.")
    return path


def has_begun(path: Path) -> bool:
    """Whether there is a store, which has its header since it was made.

    Raises
    ------
    StoreError
        Where it is one of another version.
    """
    try:
        attributes = json.loads(_bytes(path / HEADER))["attributes"]
        found = attributes[MARK]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False
    if found != FORMAT:
        raise StoreError(
            f"The store {path} has the format {found}, but this version of pymc_sgmcmc reads "
            f"{FORMAT}. Use the version that made it."
        )
    return True


def _was_being_made(path: Path) -> bool:
    """Whether a process ended while it made a store, before any draw."""
    own = {LOCK, OWNER, SETUP, *(f".{name}.tmp" for name in (OWNER, SETUP, HEADER))}
    return path.is_dir() and all(
        file.name in own
        or (file.name.startswith("chain_") and file.is_dir() and not any(file.iterdir()))
        for file in path.iterdir()
    )


def read_setup(path: Path) -> dict[str, Any]:
    """What is stored of a run when it begins.

    Raises
    ------
    StoreError
        Where the file is torn.
    """
    with readable(path):
        expected = json.loads(_bytes(path / HEADER))["attributes"]["setup"]
        if _checksum(_bytes(path / SETUP)) != expected:
            raise ValueError(f"{SETUP} has another checksum")
        return _content(path / SETUP)


@contextmanager
def held(path: Path, setup: Mapping[str, Any], chains: int) -> Iterator[bool]:
    """Hold the store of a run, and make it where it has not begun.

    Parameters
    ----------
    path : Path
    setup : mapping
        What is stored of a run when it begins.
    chains : int

    Yields
    ------
    bool
        Whether there was one.

    Raises
    ------
    OSError
    StoreError
        Where it is in use.
    """
    path.mkdir(exist_ok=True)
    with _locked(path, path):
        begun = has_begun(path)
        owner = {"process": os.getpid(), "machine": socket.gethostname()}
        try:
            write_file(path / OWNER, json.dumps(owner).encode())
            if not begun:
                _make(path, setup, chains)
        except OSError as error:
            raise _explained(error, f"The store {path} could not be made.") from error
        for number in range(chains if begun else 0):
            # A process of a chain may have outlived its parent, for one run of draws.
            with _locked(ChainStore(path, number).folder, path):
                pass
        yield begun


def _make(path: Path, setup: Mapping[str, Any], chains: int) -> None:
    """Write everything that a store has before the first draw, and its header last."""
    for number in range(chains):
        ChainStore(path, number).folder.mkdir(exist_ok=True)
    content = _packed(dict(setup), "setup")
    write_file(path / SETUP, content)
    write_file(path / HEADER, group_metadata({MARK: FORMAT, "setup": _checksum(content)}))
    _sync_folder(path.parent)
