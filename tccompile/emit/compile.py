"""Kernels to machine code: Numba to PTX, PTX to a cubin by ptxas, in parallel processes, with a cache on disk. Needs no GPU.

The same code and the same tools give the same bytes: names that Numba numbers by process are replaced, and each kernel
is assembled by itself from a file of a fixed name.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache as memoised
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import numpy as np

from tccompile.arch import ARCHS, Arch
from tccompile.emit import cache
from tccompile.errors import TccompileError, UsageError
from tccompile.kernels import kernel as kernel_named
from tccompile.kernels.spec import Code, Function
from tccompile.plan.format import Image
from tccompile.schedule import digest


class CodegenError(TccompileError):
    """A kernel of ours that does not compile as it should: a bug of tccompile's, not of the model's."""


class SpillError(CodegenError):
    """A kernel that needs more registers than a thread may have: right, but slow, so another config should be taken.

    jobs  what spilled, of all that was to be emitted
    """

    def __init__(self, message: str, jobs: tuple[Job, ...] = ()):
        super().__init__(message, jobs)
        self.jobs = jobs

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel: registers a thread, bytes of static shared memory a block, bytes of stack a thread."""

    registers: int
    shared: int
    stack: int


Job = tuple[Code, Arch, str]
"""What to compile, for which generation, as "cubin" or "ptx"."""

Progress = Callable[[int, int], None]
"""Called with how many jobs are done, and of how many."""

POOL_FROM = 4
"""Jobs from which processes are started: each takes about a second to import Numba."""

PTX_VERSIONS = ("5.0", "6.0", "6.3", "6.4", "6.5", "7.0", "7.1", "7.4", "7.8", "8.0", "8.1", "8.3", "8.4", "8.6", "8.7", "8.8")
"""PTX ISA versions worth trying, oldest first: those that brought targets or instructions (PTX ISA, "Release Notes")."""


# --- One kernel ------------------------------------------------------------------------------------------------------


def compile_code(code: Code, arch: Arch, kind: str = "cubin") -> Image:
    """The kernel's code for one generation: "cubin", or "ptx" in the lowest PTX version that takes it.

    From the cache if it has been compiled before. Raises CodegenError if Numba or ptxas refuses it, or if it spills
    registers; UsageError if the installed CUDA toolchain does not know the generation.
    """
    return _built(code, arch, kind)[0]


def resources(code: Code, arch: Arch) -> Resources:
    """Registers and memory that the kernel uses on a generation."""
    return _built(code, arch, "cubin")[1]


def ptx_text(function: Function, arch: Arch, name: str, library: Any = None) -> str:
    """The PTX of a kernel's function, with `name` as its entry: the same text in every process.

    Where the generation can start a grid while those before it still run, the code waits for their end. `library` is what
    `_library` gives for the function and this generation, or another that it suits. Raises whatever Numba raises.
    """
    (text,) = (library or _library(function, arch)).get_asm_strs(cc=arch.target)
    if function.cluster > 1:
        text = re.sub(r"(?m)^(\.maxntid.*)$", rf"\1\n.explicitcluster\n.reqnctapercluster {function.cluster}, 1, 1", text)
    text = _stable(text, name)
    return _waiting(text) if arch.tma else text


def _library(function: Function, arch: Arch) -> Any:
    """Numba's library of a kernel's function, as LLVM IR: what `numba.cuda.compile` makes the PTX of one generation from."""
    from numba.cuda import compiler

    options = {
        "device": False,
        "abi": "numba",
        "fastmath": function.fastmath,
        "launch_bounds": (function.threads, function.blocks),
    }
    with _quick_numba() as ready:
        if ready:
            return compiler._compile_pyfunc_with_fixup(function.function, function.signature, cc=arch.target, **options)[0]
    return _Recompiled(lambda cc: compiler.compile(function.function, function.signature, cc=cc, **options)[0])


@dataclass(frozen=True)
class _Recompiled:
    """What stands for a library where there is none to be had: each generation's PTX is compiled from the beginning."""

    compile: Callable[[Any], str]

    def get_asm_strs(self, cc: Any) -> list[str]:
        return [self.compile(cc)]


class _Asked(tuple[Any, ...]):
    """A generation's number as Numba sees it while it makes LLVM IR, and asks whether it is at least some other.

    questions  all of them, for good: what Numba compiled for one kernel is part of others, and then it does not ask again
    """

    questions: ClassVar[set[tuple[Any, ...]]] = set()

    def __ge__(self, other: tuple[Any, ...]) -> bool:
        self.questions.add(other)
        return tuple(self) >= other

    def __lt__(self, other: tuple[Any, ...]) -> bool:
        return not self >= other

    def __gt__(self, other: tuple[Any, ...]) -> bool:
        raise AssertionError("Numba has no such question")

    __le__ = __gt__


class _Known:
    """A generation for `Kernel.build`, with the figures that it has looked up."""

    def __init__(self, arch: Arch):
        self._arch, self.figures = arch, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:
        return self.figures.setdefault(name, getattr(self._arch, name))


@dataclass(frozen=True)
class _Lowered:
    """A kernel's function and its LLVM IR, which is that of all generations that are alike in what it was made by."""

    function: Function
    library: Any
    figures: Mapping[str, Any]
    cc: tuple[Any, ...]

    def suits(self, arch: Arch) -> bool:
        alike = all(getattr(arch, name) == value for name, value in self.figures.items())
        return alike and all((self.cc >= q) == (arch.target >= q) for q in tuple(_Asked.questions))  # other threads may add


@lru_cache(maxsize=1)
def _lowerings(code: Code) -> list[_Lowered]:
    """What was made of the code. Remembered for other generations, which come next."""
    return []


def _lowered(code: Code, arch: Arch) -> _Lowered:
    made = _lowerings(code)
    found = next((m for m in made if m.suits(arch)), None)
    if found is None:
        known = _Known(arch)
        function = kernel_named(code.kernel).build(cast(Arch, known), **dict(code.params))
        found = _Lowered(function, _library(function, arch), known.figures, arch.target)
        made.append(found)
    return found


KNOWN_NUMBA = "0.30."
"""Releases of numba-cuda whose insides `_quick_numba` knows."""


@contextmanager
def _quick_numba() -> Iterator[bool]:
    """Numba with two of its functions replaced by ones that do the same in less time: half of what a kernel takes to compile.
    And its questions about the generation are noted, see `_Asked`.

    `inline_function` inlines the IR that it has just made for the one call, not a copy of a copy of it: each block's copy has
    all variables of the function in it. `_find_singly_assigned_variable` goes through a block once, not once for each variable.
    All threads of the process see what is replaced, so Numba's own lock is held until it is put back: no other one compiles
    meanwhile, of this compiler's or of the user's.
    Yields whether this is a release of numba-cuda that the replacements were made for, and all is where it was sought; else
    Numba is as quick as it is.
    """
    try:
        from numba.cuda.compiler import CUDAFlags, _compile_pyfunc_with_fixup  # noqa: F401  what `_library` calls
        from numba.cuda.core import inline_closurecall, ir
        from numba.cuda.core.analysis import compute_use_defs, must_use_alloca
        from numba.cuda.core.compiler_lock import global_compiler_lock
        from numba.cuda.core.inline_closurecall import InlineWorker
        from numba.cuda.lowering import Lower
        from numba_cuda import __version__ as release

        places = (
            (inline_closurecall, "copy"),
            (InlineWorker, "inline_function"),
            (Lower, "_find_singly_assigned_variable"),
            (CUDAFlags, "compute_capability"),
        )
        known = release.startswith(KNOWN_NUMBA) and all(hasattr(owner, name) for owner, name in places)
    except ImportError:
        known = False
    if not known:
        yield False
        return

    def inline_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, inline_closurecall.copy = inline_closurecall.copy, _AsItIs
        try:
            return inline(self, *args, **kwargs)
        finally:
            inline_closurecall.copy = outer

    def find_singly_assigned_variable(self: Any) -> None:
        blocks, found = self.func_ir.blocks, compute_use_defs(self.func_ir.blocks)
        used = set().union(*found.usemap.values(), must_use_alloca(blocks))
        assigned = Counter(s.target.name for block in blocks.values() for s in block.find_insts(ir.assign_types))
        once = (name for names in found.defmap.values() for name in names if assigned[name] == 1)
        self._singly_assigned_vars, self._blk_local_varmap = set(once) - used, {}

    with global_compiler_lock:
        before = [getattr(owner, name) for owner, name in places]
        real, inline, _, number = before
        asked = property(lambda self: _Asked(number.__get__(self) or ()), number.fset, number.fdel)
        try:
            for (owner, name), new in zip(places, (real, inline_function, find_singly_assigned_variable, asked), strict=True):
                setattr(owner, name, new)
            yield True
        finally:
            for (owner, name), old in zip(places, before, strict=True):
                setattr(owner, name, old)


class _AsItIs:
    """For the module `copy`, where nobody reads the original again."""

    @staticmethod
    def deepcopy(value: Any) -> Any:
        return value


_ARITHMETIC = re.compile(
    r"\t(\.reg|\.local|\.shared|ld\.param|mov|cvta?|add|sub|mul|mad|neg|abs|min|max|div|rem"
    r"|and|or|xor|not|shl|shr|shf|bfe|bfi|prmt|setp|selp)\b"
)


def _waiting(ptx: str) -> str:
    """The PTX of a kernel that waits for the grids before it, unless it does already: after the arithmetic at its beginning.

    Then it lets those after it start: not sooner, or they take the place of blocks that have work to do. Loads by way of the
    read-only cache become plain ones, since ptxas moves those ahead of the wait.
    """
    ptx = ptx.replace("ld.global.nc.", "ld.global.")
    if "griddepcontrol.wait" in ptx:
        return ptx
    head, body = re.split(r"(?m)^\{\n", ptx, maxsplit=1)
    lines = body.splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if not _ARITHMETIC.match(line))
    return "".join([head, "{\n", *lines[:at], "\tgriddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;\n", *lines[at:]])


def assemble(ptx: str, target: str) -> tuple[bytes, Resources]:
    """PTX to a cubin, by the ptxas of the toolchain that Numba uses.

    Raises CodegenError with ptxas' message on an error, on spills, and on warnings C75xx (serialised wgmma).
    """
    with tempfile.TemporaryDirectory(prefix="tccompile-") as folder:
        Path(folder, "kernel.ptx").write_text(ptx)
        command = [_ptxas(), f"-arch={target}", "-O3", "-v", "--warn-on-spills", "kernel.ptx", "-o", "kernel.cubin"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        log = done.stdout + done.stderr
        if done.returncode:
            raise CodegenError(f"ptxas: {log.strip()}")
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
        if any(spilled):
            raise SpillError(f"it spills registers ({max(spilled)} bytes a thread)")
        if warning := re.search(r".*\bC75\d\d\b.*", log):
            raise CodegenError(f"ptxas: {warning[0].strip()}")
        cubin = Path(folder, "kernel.cubin").read_bytes()
    figures = (r"Used (\d+) registers", r"(\d+) bytes smem", r"(\d+) bytes stack")
    return cubin, Resources(*(_figure(pattern, log) for pattern in figures))


def _figure(pattern: str, log: str) -> int:
    return max((int(n) for n in re.findall(pattern, log)), default=0)


def _built(code: Code, arch: Arch, kind: str) -> tuple[Image, Resources]:
    assert kind in ("cubin", "ptx"), kind
    key = _key(code, arch, kind)
    if (found := _kept(key, code, arch, kind)) is not None:
        return found
    image, used = _build(code, arch, kind)
    cache.put(key, _FIGURES.pack(used.registers, used.shared, used.stack) + image.code)
    return image, used


_FIGURES = struct.Struct("<3I")
"""What an entry of the cache begins with; the code follows."""


def _kept(key: str, code: Code, arch: Arch, kind: str) -> tuple[Image, Resources] | None:
    """What the cache has of it; None if that is nothing, or too short to be all."""
    entry = cache.get(key)
    if entry is None or len(entry) <= _FIGURES.size:
        return None
    return Image(arch.name, kind, _entry_name(code), entry[_FIGURES.size :], code.kernel, code.params), Resources(
        *_FIGURES.unpack_from(entry)
    )


def _build(code: Code, arch: Arch, kind: str) -> tuple[Image, Resources]:
    check_toolchain(arch)
    try:
        text, cubin, used = _compiled(code, arch)
    except Exception as error:
        params = ", ".join(f"{k}={v!r}" for k, v in code.params)
        message = f"kernel {code.kernel}({params}) does not compile for {arch.name}: {error}"
        if isinstance(error, SpillError):
            raise SpillError(message, ((code, arch, kind),)) from None
        raise CodegenError(message) from (None if isinstance(error, CodegenError) else error)
    made = _oldest_ptx(text, arch).encode() if kind == "ptx" else cubin
    return Image(arch.name, kind, _entry_name(code), made, code.kernel, code.params), used


@lru_cache(maxsize=1)
def _compiled(code: Code, arch: Arch) -> tuple[str, bytes, Resources]:
    """PTX and cubin of a kernel. Remembered for the job that wants it in the other kind, which comes next."""
    lowered = _lowered(code, arch)
    text = ptx_text(lowered.function, arch, _entry_name(code), lowered.library)
    return text, *assemble(text, arch.name)


def _entry_name(code: Code) -> str:
    return "tc_" + re.sub(r"\W", "_", code.kernel)


_NUMBERED = re.compile(r"[\w$]*(?:_Z\w*|_cudapy_\w+|\$cst\$\w+)[\w$]*")
"""Names in PTX that Numba or LLVM made from a counter of the process, or from where the source lies."""


def _stable(ptx: str, name: str) -> str:
    """The PTX with such names replaced in the order in which they appear, without comments and without Numba's environment."""
    lines = [line.rstrip() for line in ptx.splitlines()]
    kept = [x for x in lines if x and not x.lstrip().startswith("//") and "NumbaEnv" not in x.partition("=")[0]]
    text = "\n".join(kept) + "\n"
    entries = re.findall(r"\.entry\s+([\w$]+)", text)
    if len(entries) != 1:
        raise CodegenError(f"{len(entries)} entry functions in its PTX")
    text = re.sub(rf"\b{re.escape(entries[0])}(?=_param_|\b)", name, text)
    names: dict[str, str] = {}
    return _NUMBERED.sub(lambda m: names.setdefault(m[0], f"${name}_{len(names)}"), text)


def _oldest_ptx(ptx: str, arch: Arch) -> str:
    """The PTX with the lowest `.version` that ptxas accepts it with: a driver refuses what is newer than itself."""
    own = re.search(r"^\.version\s+(\S+)", ptx, re.M)
    assert own, "PTX without a version"
    for version in PTX_VERSIONS:
        if _number(version) >= _number(own[1]):
            break
        text = ptx.replace(own[0], f".version {version}", 1)
        try:
            assemble(text, arch.name)
        except CodegenError:
            continue
        return text
    return ptx


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# --- The toolchain ---------------------------------------------------------------------------------------------------


@memoised
def _ptxas() -> str:
    """The ptxas of the CUDA packages that Numba takes NVVM from; never one that happens to be on PATH."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility, load_nvidia_dynamic_lib

        nvvm = Path(load_nvidia_dynamic_lib("nvvm").abs_path)
    except Exception as error:
        raise UsageError(
            f"compiling needs the CUDA compiler packages; install them: pip install 'tccompile[compiler]' ({error})"
        ) from error
    name = "ptxas.exe" if sys.platform == "win32" else "ptxas"
    beside = (folder / "bin" / name for folder in nvvm.parents[:4])
    found = next((str(p) for p in beside if p.is_file()), None) or find_nvidia_binary_utility("ptxas")
    if found is None:
        raise UsageError(f"no ptxas beside {nvvm}; install the CUDA compiler packages: pip install 'tccompile[compiler]'")
    return found


@memoised
def toolchain() -> dict[str, str]:
    """Versions of the tools that make machine code, by name. UsageError if they cannot work together."""
    try:
        import llvmlite
        import numba
        import numba_cuda
        from numba.cuda.np import arrayobj  # noqa: F401  what a newer NumPy than Numba knows breaks
    except Exception as error:  # Numba raises types of its own, and AttributeError for what NumPy no longer has
        raise UsageError(
            f"Numba-CUDA cannot be imported beside NumPy {np.__version__} ({error}); "
            "install versions that fit: pip install 'tccompile[compiler]'"
        ) from error

    said = subprocess.run([_ptxas(), "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release \S+, V(\S+)", said)
    return {
        "numba": numba.__version__,
        "numba-cuda": numba_cuda.__version__,
        "llvmlite": llvmlite.__version__,
        "ptxas": version[1] if version else said.strip(),
    }


@memoised
def _targets() -> frozenset[str]:
    """The generations that the installed ptxas and Numba's NVRTC both know, as sm_80: ptxas 13's help still names older ones."""
    from numba.cuda.cudadrv import nvrtc

    said = subprocess.run([_ptxas(), "--help"], capture_output=True, text=True).stdout
    oldest = min(nvrtc.get_supported_ccs())
    return frozenset(name for name in re.findall(r"\bsm_\d+[a-z]?\b", said) if name in ARCHS and ARCHS[name].cc >= oldest)


def check_toolchain(arch: Arch) -> None:
    """Raise UsageError if the installed CUDA toolchain makes no code for the generation."""
    if arch.name not in _targets():
        raise UsageError(
            f"the installed CUDA toolchain (ptxas {toolchain()['ptxas']}) makes no code for {arch.name}; "
            f"it knows {', '.join(a for a in ARCHS if a in _targets())}. "
            "CUDA 12.9 knows all of them: pip install 'numba-cuda[cu12]', or leave the generation out with --arch"
        )


# --- Keys ------------------------------------------------------------------------------------------------------------


def _key(code: Code, arch: Arch, kind: str) -> str:
    """A name for what comes out: it depends on the sources of the kernel's module and all that it imports, and on this file."""
    sources = digest.sources_of(type(kernel_named(code.kernel)).__module__)
    return digest.key(code.kernel, code.params, repr(arch), kind, toolchain(), sources, digest.source_of(__name__))


# --- Many kernels ----------------------------------------------------------------------------------------------------


def emit(wanted: Iterable[Job], progress: Progress | None = None, jobs: int | None = None) -> dict[Job, Image]:
    """Compile many kernels, each once, in `jobs` processes (as many as cores if None).

    The result has the order of `wanted`. Raises as `compile_code`: the first failure, in that order; SpillError only when all
    others could be compiled, and for all that spill.
    """
    todo = list(dict.fromkeys(wanted))
    images: dict[Job, Image] = {}
    for job in todo:
        if (found := _kept(_key(*job), *job)) is not None:
            images[job] = found[0]
    misses = [job for job in todo if job not in images]
    done = len(images)
    if progress:
        progress(done, len(todo))

    def finished(job: Job, image: Image) -> None:
        nonlocal done
        images[job] = image
        done += 1
        if progress:
            progress(done, len(todo))

    workers = min(jobs or os.cpu_count() or 1, len(misses))
    spills: list[SpillError] = []
    if workers < 2 or len(misses) < POOL_FROM or not sys.executable:
        for job in misses:
            try:
                finished(job, compile_code(*job))
            except SpillError as error:
                spills.append(error)
    else:
        spills = _in_processes(misses, workers, finished)
    if misses:
        cache.evict()
    if spills:
        raise SpillError(str(spills[0]), tuple(job for error in spills for job in error.jobs))
    return {job: images[job] for job in todo}


def _in_processes(misses: list[Job], workers: int, finished: Callable[[Job, Image], None]) -> list[SpillError]:
    """Compile in worker processes of our own: multiprocessing's would run the caller's main module again.

    One code's generations and kinds go to the same worker, one after the other. Returns the errors of what spills, and raises
    the first other failure. An interrupt ends the workers at once.
    """
    team = [Worker() for _ in range(workers)]
    idle = [*team]
    failures: dict[int, TccompileError] = {}
    spills: dict[int, SpillError] = {}
    together: dict[Code, list[int]] = {}
    for i, (code, _, _) in enumerate(misses):
        together.setdefault(code, []).append(i)

    def compile_all(indices: list[int]) -> list[tuple[int, Image | TccompileError]]:
        worker = idle.pop()
        try:
            return [(i, worker.compile(misses[i])) for i in indices]
        finally:
            idle.append(worker)

    with ThreadPoolExecutor(workers) as threads:
        try:
            for future in as_completed([threads.submit(compile_all, indices) for indices in together.values()]):
                for i, result in future.result():
                    if isinstance(result, SpillError):
                        spills[i] = SpillError(str(result), (misses[i],))
                    elif isinstance(result, TccompileError):
                        failures[i] = result
                    else:
                        finished(misses[i], result)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            stop(team)
            raise
        finally:
            threads.shutdown(cancel_futures=True)
            for worker in team:
                worker.close()
    if failures:
        raise failures[min(failures)]
    return [spills[i] for i in sorted(spills)]


def remake(wanted: Sequence[Job], progress: Progress | None = None, jobs: int | None = None) -> list[Image | TccompileError]:
    """Compile kernels, each in `wanted`'s place what comes of it, whatever the cache holds."""
    todo = list(dict.fromkeys(wanted))
    team = [Worker(cached=False) for _ in range(min(jobs or os.cpu_count() or 1, len(todo)))]
    idle, made = [*team], dict[Job, Image | TccompileError]()

    def compile_one(job: Job) -> tuple[Job, Image | TccompileError]:
        worker = idle.pop()
        try:
            return job, worker.compile(job)
        finally:
            idle.append(worker)

    threads = ThreadPoolExecutor(max(len(team), 1))
    try:
        for future in as_completed([threads.submit(compile_one, job) for job in todo]):
            job, result = future.result()
            made[job] = result
            if progress:
                progress(len(made), len(todo))
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        stop(team)
        raise
    finally:
        threads.shutdown(cancel_futures=True)
        for worker in team:
            worker.close()
    return [made[job] for job in wanted]


class Worker:
    """A child process that compiles jobs: length-prefixed pickles over its standard streams, both ends this program's.

    cached  whether it takes from the cache what is there, and puts there what it makes
    """

    def __init__(self, cached: bool = True) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "CUDA_VISIBLE_DEVICES": ""}
        # Without a folder nothing is found in the cache or kept there.
        environment["TCCOMPILE_CACHE_DIR"] = str(cache.folder()) if cached else os.devnull
        command = [
            sys.executable,
            "-P",
            "-c",
            "from tccompile.emit.compile import serve; serve()",
        ]  # -P: import nothing from here
        # In a group of its own: the terminal's interrupt reaches only the parent, which ends workers: see `stop`.
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)

    def compile(self, job: Job) -> Image | TccompileError:
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
        toolchain()
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
