"""Processes that compile: each a Python of its own with Numba in it, which takes jobs and gives images until it is closed."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import IO, Any

from tccompile.emit import cache, toolchain
from tccompile.emit.compile import compile_code
from tccompile.emit.job import CodegenError, Job
from tccompile.errors import TccompileError
from tccompile.plan.format import Image

Result = Image | TccompileError
"""What comes of a job: its image, or what is wrong with it."""


class Team:
    """Processes of our own that compile: multiprocessing's would run the caller's main module again.

    They are started with the first jobs, at most `most` of them, and end with the block: an interrupt or another exception ends
    them at once, as does what nobody waits for any more.

    cached  as for `Worker`
    """

    def __init__(self, most: int, cached: bool = True) -> None:
        self.most, self.cached = most, cached
        self._threads = ThreadPoolExecutor(max(most, 1))  # each waits for a process
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._begun: dict[Job, Future[list[tuple[Job, Result]]]] = {}

    def __contains__(self, job: Job) -> bool:
        """Whether it is being compiled, or has been."""
        return job in self._begun

    @property
    def started(self) -> bool:
        """Whether there are any processes."""
        return bool(self._workers)

    def start(self, count: int) -> None:
        """Have so many processes, or as many as there may be: before there is anything to compile they import Numba."""
        for _ in range(min(count, self.most) - len(self._workers)):
            self._workers.append(worker := Worker(self.cached))
            self._idle.append(worker)

    def begin(self, groups: Sequence[Sequence[Job]]) -> None:
        """Have jobs compiled. Those of a group go to the same process, one after the other; those begun before are left out."""
        new = [own for group in groups if (own := [job for job in group if job not in self])]
        self.start(len(self._begun) + sum(map(len, new)))
        for group in new:
            self._begun |= dict.fromkeys(group, self._threads.submit(self._compile, group))

    def compile(self, groups: Sequence[Sequence[Job]], finished: Callable[[Job, Result], None]) -> None:
        """Compile the jobs of these groups, and no others any more. `finished` is told each one's result, a group at a time and
        in the caller's thread."""
        wanted = {job for group in groups for job in group}
        for job in [job for job, future in self._begun.items() if job not in wanted and future.cancel()]:
            del self._begun[job]
        self.begin(groups)
        for future in as_completed({self._begun[job] for job in wanted}):
            for job, result in future.result():
                if job in wanted:
                    finished(job, result)

    def _compile(self, group: Sequence[Job]) -> list[tuple[Job, Result]]:
        worker = self._idle.pop()
        try:
            return [(job, worker.compile(job)) for job in group]
        finally:
            self._idle.append(worker)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if kind is not None or not all(future.done() for future in self._begun.values()):
            stop(self._workers)
        self._threads.shutdown()
        for worker in self._workers:
            worker.close()


class Worker:
    """A child process that compiles jobs: length-prefixed pickles over its standard streams, both ends this program's.

    cached  whether it takes from the cache what is there, and puts there what it makes
    """

    def __init__(self, cached: bool = True) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "CUDA_VISIBLE_DEVICES": ""}
        # Where no folder can be, nothing is found in the cache or kept there.
        environment["TCCOMPILE_CACHE_DIR"] = str(cache.folder() if cached else cache.NOWHERE)
        command = [
            sys.executable,
            "-P",
            "-c",
            "from tccompile.emit.workers import serve; serve()",
        ]  # -P: import nothing from here
        # In a group of its own: the terminal's interrupt reaches only the parent, which ends workers: see `stop`.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)

    def compile(self, job: Job) -> Result:
        """The image, or what is wrong with the job."""
        assert self.process.stdin and self.process.stdout
        try:
            _send(self.process.stdin, job)
            result = _receive(self.process.stdout)
        except (OSError, EOFError) as error:
            code = self.process.wait()
            raise CodegenError(
                f"the process that compiled kernel {job[0].kernel} for {job[1].name} ended with status {code}"
            ) from error
        return result

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        with suppress(OSError):  # it may have ended before
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


PATIENCE = 0.5
"""Seconds that a worker has to put away its files."""


def stop(workers: Iterable[Worker]) -> None:
    """End workers in the midst of what they do. One that has files runs Python, and deletes them; one in NVVM has none."""
    for worker in workers:
        worker.process.terminate()
    end = time.monotonic() + PATIENCE
    for worker in workers:
        try:
            worker.process.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):  # it may have ended now
                os.killpg(worker.process.pid, signal.SIGKILL)


def _stopped(*_: object) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries may have something to say of it, which nobody asked for
    sys.exit()


def serve() -> None:
    """A worker's whole life: read a job, write its image or the error, until there are no more."""
    signal.signal(signal.SIGTERM, _stopped)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    with suppress(TccompileError):  # which the first job says
        toolchain.versions()
    gc.freeze()  # Numba's own objects stay, and looking for garbage among a kernel's often takes a third of its time
    gc.set_threshold(100_000, 20, 50)
    while True:
        try:
            job = _receive(sys.stdin.buffer)
        except EOFError:
            return
        try:
            result: Any = compile_code(*job)
        except TccompileError as error:
            result = type(error)(str(error))
        except Exception as error:
            result = CodegenError(f"kernel {job[0].kernel} for {job[1].name}: {type(error).__name__}: {error}")
        try:
            _send(answers, result)
        except BrokenPipeError:  # nobody waits for it any more
            return


def _send(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))
