"""Many kernels, each compiled once, in parallel."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from tccompile.emit import cache
from tccompile.emit.compile import compile_anew, compile_code, kept
from tccompile.emit.job import Job, Progress, SpillError
from tccompile.emit.workers import Result, Team
from tccompile.errors import TccompileError
from tccompile.kernels.custom import CustomKernel
from tccompile.kernels.spec import Code
from tccompile.plan.format import Image

POOL_FROM = 4
"""Jobs from which processes are started: each takes about a second to import Numba."""


EXPECTED = 8
"""Processes that are started before it is known what there is to compile."""


def team(jobs: int | None) -> Team:
    """`jobs` processes, or as many as cores if None."""
    return Team(jobs or os.cpu_count() or 1)


def expect(ahead: Team) -> None:
    """Have processes started for what will be many kernels, if there are none in the cache: which these are does not matter."""
    if _for_processes(EXPECTED, ahead.most) and cache.is_empty():
        ahead.start(EXPECTED)


def begin(wanted: Iterable[Job], ahead: Team) -> None:
    """Have a team begin with kernels of which most will be wanted, while it is found out which."""
    missing = [job for job in dict.fromkeys(wanted) if job[0].kernel != CustomKernel.name and kept(job) is None]
    if _for_processes(len(missing), ahead.most):
        ahead.begin(_by_code(missing))


def emit(
    wanted: Iterable[Job], progress: Progress | None = None, jobs: int | None = None, ahead: Team | None = None
) -> dict[Job, Image]:
    """Compile many kernels, each once, in `jobs` processes (as many as cores if None).

    ahead  processes that may have begun with some of them
    The result has the order of `wanted`. Raises as `compile_code`: the first failure, in that order; SpillError only when all
    others could be compiled, and for all that spill.
    """
    todo = list(dict.fromkeys(wanted))
    images = {job: image for job in todo if (image := kept(job)) is not None}
    misses = [job for job in todo if job not in images]
    failures: dict[Job, TccompileError] = {}
    if progress:
        progress(len(images), len(todo))

    def finished(job: Job, result: Result) -> None:
        if isinstance(result, TccompileError):
            failures[job] = result
            return
        images[job] = result
        if progress:
            progress(len(images), len(todo))

    here, elsewhere = _of_users(misses), [job for job in misses if job[0].kernel != CustomKernel.name]
    if ahead is not None and ahead.started:
        ahead.compile(_by_code(elsewhere), finished)
    elif _for_processes(len(elsewhere), most := min(jobs or os.cpu_count() or 1, len(elsewhere))):
        with Team(most) as own:
            own.compile(_by_code(elsewhere), finished)
    else:
        here = misses
    for job in here:
        try:
            finished(job, compile_code(*job))
        except SpillError as error:
            finished(job, error)
    if misses or (ahead is not None and ahead.started):
        cache.evict()
    _raise_first([(job, failures[job]) for job in misses if job in failures])
    return {job: images[job] for job in todo}


def _for_processes(jobs: int, most: int) -> bool:
    """Whether processes compile so many jobs, of which there may be so many."""
    return most > 1 and jobs >= POOL_FROM and bool(sys.executable)


def _of_users(jobs: Iterable[Job]) -> list[Job]:
    """The jobs of users' own kernels, whose Python is in this process alone."""
    return [job for job in jobs if job[0].kernel == CustomKernel.name]


def _by_code(jobs: Iterable[Job]) -> list[list[Job]]:
    """The jobs of one code together: its generations share what is alike."""
    groups: dict[Code, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job[0], []).append(job)
    return list(groups.values())


def _raise_first(failures: Sequence[tuple[Job, TccompileError]]) -> None:
    """Raise the first failure that is no spill; if there is none, one SpillError for all that spill."""
    for _, error in failures:
        if not isinstance(error, SpillError):
            raise error
    if failures:
        raise SpillError(str(failures[0][1]), tuple(job for job, _ in failures))


def remake(wanted: Sequence[Job], progress: Progress | None = None, jobs: int | None = None) -> list[Result]:
    """Compile kernels, each in `wanted`'s place what comes of it, whatever the cache holds."""
    todo = list(dict.fromkeys(wanted))
    made: dict[Job, Result] = {}

    def finished(job: Job, result: Result) -> None:
        made[job] = result
        if progress:
            progress(len(made), len(todo))

    here = _of_users(todo)
    elsewhere = [job for job in todo if job not in here]
    with Team(min(jobs or os.cpu_count() or 1, len(elsewhere)), cached=False) as own:
        own.compile([[job] for job in elsewhere], finished)
    for job in here:
        try:
            finished(job, compile_anew(*job))
        except TccompileError as error:
            finished(job, error)
    return [made[job] for job in wanted]
