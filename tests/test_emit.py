"""Machine code: what comes out, that it is always the same, and the cache."""

from __future__ import annotations

import hashlib
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tccompile import kernels
from tccompile.arch import ARCHS, Arch, Feature
from tccompile.emit import cache, many, numba, ptxas, quicker, toolchain, workers
from tccompile.emit import compile as compiling
from tccompile.emit.compile import compile_code, resources
from tccompile.emit.job import CodegenError, SpillError
from tccompile.emit.ptx import ptx_text
from tccompile.errors import UsageError
from tccompile.kernels.spec import Code, Function, code
from tccompile.kernels.text import Intrinsic
from tccompile.schedule import digest
from tests.gpu.cases import program_of
from tests.small import image
from tests.tiers import thorough, usually


class Toy:
    """A kernel whose code depends on its parameters alone."""

    name = "toy"

    def blamed(self, code, arch, error):
        """Nobody but us."""

    def build(self, arch, n=1, fault=""):
        from tccompile.kernels.ptx.core import cuda, inline, types

        @inline
        def scaled(a):
            return a * n

        def kernel(x, count):
            dynamic = cuda.shared.array(0, types.uint8)
            fixed = cuda.shared.array(32, types.uint8)
            i = cuda.grid(1)
            fixed[cuda.threadIdx.x] = i
            dynamic[cuda.threadIdx.x] = scaled(fixed[i // 2])

        def crowded(x, count):
            values = cuda.local.array(96, types.float32)
            shared = cuda.shared.array(9000, types.float32)
            for k in range(96):
                values[k] = shared[k * 7 + count]
            for r in range(count):
                for k in range(96):
                    values[k] = values[k] * values[(k + 5) % 96] + shared[r + k]
            for k in range(96):
                shared[k] = values[k]

        def wrong(x, count):
            return x + "text"

        signature = types.void(types.uint64, types.int32)
        if fault == "spills":
            return Function(crowded, signature, 1024, 2)
        return Function(wrong if fault else kernel, signature, 128)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of its own, and the toy among the kernels."""
    monkeypatch.setenv("TCCOMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "KERNELS", (*kernels.KERNELS, Toy()))
    return tmp_path


@pytest.mark.parametrize("arch", ARCHS.values(), ids=list(ARCHS))
def test_every_generation(arch):
    image = compile_code(code("toy", n=3), arch)
    assert (image.arch, image.kind, image.function) == (arch.name, "cubin", "tc_toy")
    assert image.code[:4] == b"\x7fELF" and b"tc_toy" in image.code and b"NumbaEnv" not in image.code
    used = resources(code("toy", n=3), arch)
    assert 0 < used.registers < 64 and used.shared >= 32


@pytest.mark.parametrize(("name", "version"), [("sm_61", "5.0"), ("sm_80", "7.0")])
def test_ptx_is_as_old_as_it_can_be(name, version):
    text = compile_code(code("toy", n=3), ARCHS[name], "ptx").code.decode()
    assert text.startswith(f".version {version}\n.target {name}\n")
    assert re.findall(r"\.entry (\S+)\(", text) == ["tc_toy"] and "Numba" not in text and "/" not in text


@thorough
def test_the_same_bytes_in_every_process(fresh):
    """Whatever was compiled before: Numba numbers functions by process"""
    program = """
import sys
from tccompile import kernels
from tccompile.arch import ARCHS, Arch
from tccompile.emit.compile import compile_code
from tccompile.kernels.spec import code
from tests.test_emit import Toy
import hashlib
kernels.KERNELS = (Toy(),)
for n in map(int, sys.argv[1:]):
    for kind in ("cubin", "ptx"):
        print(n, kind, hashlib.sha256(compile_code(code("toy", n=n), ARCHS["sm_80"], kind).code).hexdigest())
"""
    said = []
    for number, order in enumerate(("5 6", "7 6 5")):
        environment = {**os.environ, "TCCOMPILE_CACHE_DIR": str(fresh / str(number)), "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", program, *order.split()], env=environment, capture_output=True, text=True, check=True
        )
        said.append({tuple(line.split()[:2]): line.split()[2] for line in run.stdout.splitlines()})
    assert len(said[0]) == 4 and said[0] == {k: said[1][k] for k in said[0]}
    assert len(set(said[1].values())) == 6


def test_spills_are_errors():
    with pytest.raises(CodegenError, match=r"kernel toy\(fault='spills'\) does not compile for sm_80: it spills registers"):
        compile_code(code("toy", fault="spills"), ARCHS["sm_80"])


def test_what_numba_says_is_told():
    with pytest.raises(
        CodegenError, match=r"(?s)kernel toy\(fault='typing'\) does not compile for sm_80: .*(No implementation|unicode)"
    ) as error:
        compile_code(code("toy", fault="typing"), ARCHS["sm_80"])
    assert error.value.exit_code == 70


def test_what_ptxas_says_is_told():
    with pytest.raises(CodegenError, match=r"(?s)ptxas: .*line 3"):
        ptxas.assemble(".version 7.0\n.target sm_80\n.bogus\n", "sm_80")
    log = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    text = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() { ret; }\n"
    assert ptxas.assemble(text, "sm_90a")[1].stack == 0
    fake = subprocess.CompletedProcess([], 0, "", f"ptxas warning : {log}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", lambda *a, **k: fake)
        with pytest.raises(CodegenError, match=r"C7510.*serialized"):
            ptxas.assemble(text, "sm_90a")


def test_a_toolchain_without_the_generation(monkeypatch):
    monkeypatch.setattr(toolchain, "targets", lambda: frozenset({"sm_75", "sm_80", "sm_90a"}))
    with pytest.raises(
        UsageError, match=r"ptxas 12\.\S+ makes no code for sm_61; it knows sm_75, sm_80, sm_90a.*numba-cuda\[cu12\]"
    ):
        compile_code(code("toy", n=1), ARCHS["sm_61"])


def test_a_numpy_that_numba_does_not_know():
    """As NumPy 2.5 is for numba-cuda 0.30"""
    program = (
        "import numpy; numpy.__dict__.pop('row_stack', None)\n"
        "from tccompile.emit import toolchain; from tccompile.errors import UsageError\n"
        "try: toolchain.versions()\nexcept UsageError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    said = r"Numba-CUDA cannot be imported beside NumPy \S+ \(.*row_stack.*pip install 'tccompile\[compiler\]'"
    assert re.match(said, done.stdout)


def test_ptxas_is_numbas_own(monkeypatch, tmp_path):
    """Never one that happens to be on PATH"""
    stranger = tmp_path / ("ptxas.exe" if sys.platform == "win32" else "ptxas")
    stranger.write_text("#!/bin/sh\nexit 1\n")
    stranger.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    toolchain.ptxas.cache_clear()
    assert Path(toolchain.ptxas()).parent != tmp_path


# --- Grids that start early ------------------------------------------------------------------------------------------


def texts(case: str, name: str, arch: Arch) -> list[str]:
    """The PTX of a case's launches in a kernel's first config."""
    kernel, program = kernels.kernel(name), program_of(case)
    config = next(iter(kernel.configs(program.ops[-1], program, arch)))
    codes = [dict(launch.code.params) for launch in kernel.work(program.ops[-1], program, config, arch).launches]
    return [ptx_text(kernel.build(arch, **params), arch, "k") for params in codes]


@pytest.mark.parametrize("arch", usually(ARCHS, "sm_80", "sm_120"))
def test_grids_wait_for_those_before(arch: str) -> None:
    """After the arithmetic at the kernel's beginning, where the generation has an instruction for it; what each kernel touches
    before that: tests/kernels/test_waiting.py"""
    (text,) = texts("chain", "pointwise", ARCHS[arch])
    tma = ARCHS[arch].has(Feature.EARLY_START)
    assert text.count("griddepcontrol.wait;") == text.count("griddepcontrol.launch_dependents;") == int(tma)
    assert not (tma and "ld.global.nc" in text)
    if tma:
        assert "%tid.x" in text[: text.index("griddepcontrol.wait")]


# --- The cache -------------------------------------------------------------------------------------------------------


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.bin"))


def test_an_entry_is_used_again(fresh, monkeypatch):
    image = compile_code(code("toy", n=3), ARCHS["sm_75"])
    assert len(entries(fresh)) == 1
    monkeypatch.setattr(Toy, "build", lambda *a, **k: pytest.fail("compiled again"))
    assert compile_code(code("toy", n=3), ARCHS["sm_75"]) == image
    monkeypatch.undo()


def digested(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d[:-1],
        lambda d: b"",
        lambda d: d[:40] + bytes([d[40] ^ 1]) + d[41:],
        lambda d: bytes(len(d)),
        lambda d: hashlib.sha256(b"").digest(),
        *(lambda d, n=n: digested(d[32 : 64 + n]) for n in (0, 11, 12)),
        lambda d: digested(d[33:]),
    ],
)
def test_a_damaged_entry_is_made_again(fresh, damage):
    image = compile_code(code("toy", n=3), ARCHS["sm_75"])
    (path,) = entries(fresh)
    good = path.read_bytes()
    path.write_bytes(damage(good))
    assert compile_code(code("toy", n=3), ARCHS["sm_75"]) == image
    assert path.read_bytes() == good


def test_an_entry_is_of_its_key_alone(fresh):
    """One that was copied to another's place is not taken for it"""
    images = [compile_code(code("toy", n=n), ARCHS["sm_75"]) for n in (3, 4)]
    first, second = entries(fresh)
    first.write_bytes(second.read_bytes())
    assert [compile_code(code("toy", n=n), ARCHS["sm_75"]) for n in (3, 4)] == images


NOT_WINDOWS = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there, folders have no such modes")


@NOT_WINDOWS
def test_a_folder_that_others_can_write_to_is_not_used(fresh):
    key = digest.key("x")
    cache.put(key, b"code")
    fresh.chmod(0o770)
    with pytest.warns(RuntimeWarning, match=re.escape("others can write to it (mode 770)")):
        private = cache.folder()
    assert private != fresh and private.stat().st_mode & 0o777 == 0o700
    assert cache.get(key) is None
    cache.put(key, b"made again")
    assert cache.get(key) == b"made again" and cache.folder() == private
    fresh.chmod(0o700)
    assert cache.get(key) == b"code"


@NOT_WINDOWS
def test_a_folder_of_another_user_is_not_used(fresh, monkeypatch):
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.warns(RuntimeWarning, match=f"is not used, it belongs to user {fresh.stat().st_uid}: "):
        assert cache.folder() != fresh


@NOT_WINDOWS
def test_an_entry_that_others_could_have_written_is_a_miss(fresh):
    key = digest.key("x")
    cache.put(key, b"code")
    (path,) = entries(fresh)
    path.chmod(0o666)
    assert cache.get(key) is None


@NOT_WINDOWS
def test_what_is_made_is_for_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TCCOMPILE_CACHE_DIR", str(tmp_path / "a" / "b"))
    before = os.umask(0)
    try:
        cache.put(digest.key("x"), b"code")
    finally:
        os.umask(before)
    (path,) = entries(tmp_path / "a" / "b")
    assert all(p.stat().st_mode & 0o077 == 0 for p in (path, path.parent, path.parent.parent))
    assert cache.get(digest.key("x")) == b"code"


def test_keys_tell_everything_apart(monkeypatch):
    def key(n=1, arch="sm_80", kind="cubin"):
        return compiling._key(Code("toy", (("n", n),)), ARCHS[arch], kind)

    keys = [key(), key(n=2), key(arch="sm_86"), key(kind="ptx")]
    monkeypatch.setattr(toolchain, "versions", lambda: {"ptxas": "13.0"})
    keys.append(key())
    sources_of = digest.sources_of
    for other in (Toy.__module__, compiling.__name__):  # a kernel's sources, and the compiler's
        monkeypatch.setattr(digest, "sources_of", lambda m, within="", o=other: "other" if m == o else sources_of(m, within))
        keys.append(key())
    assert len(set(keys)) == len(keys)


def test_sources_are_read_without_numba():
    program = (
        "import sys; from tccompile.schedule.digest import sources_of; sources_of('tccompile.kernels.gemm_sm90')\n"
        "assert not {'numba', 'tccompile.kernels.ptx.hopper'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_sources_are_followed(tmp_path, monkeypatch):
    """A change in a module that a kernel imports, however deep, changes its key; one elsewhere does not"""
    package = tmp_path / "plugin_for_test"
    package.mkdir()
    files = {
        "__init__": "",
        "kernel": "def build():\n    from plugin_for_test import helper\n",
        "helper": "from .deep import x\nimport json\n",
        "deep": "x = 1\n",
        "other": "y = 1\n",
    }
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

    def of_kernel() -> str:
        digest.sources_of.cache_clear()
        return digest.sources_of("plugin_for_test.kernel")

    first = of_kernel()
    (package / "other.py").write_text("y = 2\n")
    assert of_kernel() == first
    (package / "deep.py").write_text("x = 2\n")
    assert of_kernel() != first
    assert digest.sources_of("tccompile.kernels.pointwise") != digest.sources_of("tccompile.kernels.depthwise")


@pytest.mark.parametrize(
    ("name", "case"),
    [("pool", "max_pool_3x3"), ("norm_team", "group_norm"), ("depthwise_sm90", "depthwise_tail"), ("gemv_mma", "gemm_of_one")],
)
def test_what_a_kernels_text_calls_is_followed(name, case, monkeypatch):
    """A change of any module that has a function of the text changes the kernel's key, though the text only names it"""
    (kernel,) = [k for k in kernels.KERNELS if k.name == name]
    arch, program = ARCHS["sm_90a"], program_of(case)
    (op,) = program.ops
    (launch, *_) = kernel.work(op, program, next(iter(kernel.configs(op, program, arch))), arch).launches
    called = modules_of(kernel.source(arch, **dict(launch.code.params)).scope)
    assert "tccompile.kernels.ptx.memory" in called
    text = digest._text

    def key(changed: str) -> str:
        monkeypatch.setattr(digest, "_text", lambda module: text(module) + b"\nchanged = 1\n" * (module == changed))
        digest.sources_of.cache_clear()
        return digest.sources_of(type(kernel).__module__)

    keys = {key(module) for module in ("", *called)}
    digest.sources_of.cache_clear()
    assert len(keys) == 1 + len(called)


def modules_of(scope) -> set[str]:
    """The modules of the intrinsics that a text calls, or what it calls does."""
    found = set()
    for called in scope.values():
        if isinstance(called, Intrinsic):
            found.add(f"tccompile.kernels.{called.name.rpartition('.')[0]}")
        else:
            found |= modules_of(called.scope)
    return found


CODE = """
def area(w, h=1, *, unit: str = "px"):
    return f"{w * h:>{4}}" + unit

class Box:
    side: int = 3
"""


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("# what it is\n" + CODE, True),
        ('"""What it is."""\n' + CODE, True),
        (CODE.replace("return", '"""In pixels."""\n    return'), True),
        (CODE.replace("= 3", "= 3  # of it\n    \"\"\"In pixels.\"\"\""), True),
        (CODE.replace("(w, h=1, *,", "(\n    w,\n    h=1,\n    *,").replace('"px"', "'px'"), True),
        (CODE.replace("= 3", "= 4"), False),
        (CODE.replace("= 3", "= 3.0"), False),
        (CODE.replace("w * h", "h * w"), False),
        (CODE.replace('"px"', '"pt"'), False),
        (CODE.replace("h=1, *", "*, h=1"), False),
        (CODE.replace(": int = 3", " = 3"), False),
        (CODE.replace("    return", "    w += 1\n    return"), False),
    ],
)  # fmt: skip
def test_the_digest_of_a_module_is_that_of_its_code(tmp_path, monkeypatch, text, same):
    """Comments, docstrings and layout change nothing that it does, so no time that was measured with it is out of date"""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_for_digest.py").write_text(CODE)
    first = digest.source_of("module_for_digest")
    (tmp_path / "module_for_digest.py").write_text(text)
    assert (digest.source_of("module_for_digest") == first) == same


def test_the_digest_is_the_same_in_every_version_of_python(tmp_path, monkeypatch):
    """The table that comes with tccompile holds such digests"""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_for_digest.py").write_text(
        CODE + 'x = lambda *a, k=None: "one " f"{a!r} {{}}" " two" if (n := 1) else ...\n'
    )
    assert digest.source_of("module_for_digest").startswith("71ed38aa0ee3")


def test_where_it_lies(monkeypatch, tmp_path):
    assert cache.folder() == tmp_path
    monkeypatch.delenv("TCCOMPILE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache.folder() == Path("/there/tccompile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == Path.home() / ".cache" / "tccompile"
    with monkeypatch.context() as homeless:
        homeless.delenv("HOME")
        homeless.setattr("pwd.getpwuid", {}.__getitem__)  # as for a number that no user has
        cache.put("0" * 64, b"")
        cache.evict()
        assert cache.get("0" * 64) is None
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "C:/local")
    assert cache.folder() == Path("C:/local/tccompile/cache")


def test_old_entries_are_evicted(fresh):
    for i in range(5):
        cache.put(digest.key(i), bytes(1000))
        os.utime(fresh / digest.key(i)[:2] / f"{digest.key(i)}.bin", (i, i))
    left_behind = fresh / "ab" / ".failed.new"
    left_behind.parent.mkdir(exist_ok=True)
    left_behind.write_bytes(b"half")
    os.utime(left_behind, (0, 0))
    assert cache.get(digest.key(0)) == bytes(1000)  # used now
    cache.evict(limit=2 * 1064)
    assert [i for i in range(5) if cache.get(digest.key(i)) is not None] == [0, 4]
    assert not left_behind.exists()


def test_parallel_writers_and_readers(fresh):
    data = {digest.key(i): hashlib.sha256(bytes([i])).digest() * 2000 for i in range(3)}
    wrong = []

    def work() -> None:
        for _ in range(30):
            for key, value in data.items():
                cache.put(key, value)
                if cache.get(key) != value:
                    wrong.append(key)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and not list(fresh.glob("*/*.new"))


def test_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TCCOMPILE_CACHE_DIR", str(tmp_path / "file"))
    assert compile_code(code("toy", n=1), ARCHS["sm_75"]).code[:4] == b"\x7fELF"


# --- Many ------------------------------------------------------------------------------------------------------------


def test_many_in_processes(fresh):
    """The same as one by one; progress is told; a second time nothing is compiled"""
    program = program_of("chain")
    (op,) = program.ops
    family = next(k for k in kernels.KERNELS if isinstance(op, k.realises) and k.supports(op, program, ARCHS["sm_80"]) is None)
    config = next(iter(family.configs(op, program, ARCHS["sm_80"])))
    made = family.work(op, program, config, ARCHS["sm_80"]).launches[0].code
    jobs = [(made, ARCHS[a], kind) for a, kind in (("sm_61", "ptx"), ("sm_75", "cubin"), ("sm_80", "cubin"), ("sm_90a", "cubin"))]
    told: list[tuple[int, int]] = []
    images = many.emit([*jobs, jobs[1]], lambda done, total: told.append((done, total)), jobs=2)
    assert list(images) == jobs
    assert told == [(i, 4) for i in range(5)]
    assert [(i.arch, i.kind) for i in images.values()] == [(a.name, kind) for _, a, kind in jobs]
    told.clear()
    assert many.emit(jobs, lambda done, total: told.append((done, total))) == images and told == [(4, 4)]
    for path in entries(fresh):
        path.unlink()
    assert compile_code(*jobs[2]) == images[jobs[2]]


def test_processes_import_nothing_from_where_they_run(tmp_path, monkeypatch):
    """A folder that a model came in may hold anything."""
    (tmp_path / "pickle.py").write_text("raise SystemExit(open('was-imported', 'w').close())\n")
    monkeypatch.chdir(tmp_path)
    workers.Worker().close()
    assert [p.name for p in tmp_path.iterdir()] == ["pickle.py"]


def test_a_process_without_a_cache_says_nothing_of_it(monkeypatch, recwarn):
    """Where it looks for none, no folder can be."""
    asked = []
    monkeypatch.setattr(workers.subprocess, "Popen", lambda *_, env, **__: asked.append(env["TCCOMPILE_CACHE_DIR"]))
    workers.Worker(cached=False)
    monkeypatch.setenv("TCCOMPILE_CACHE_DIR", asked[0])
    cache.put("0" * 64, b"code")
    assert cache.get("0" * 64) is None and cache.size() == (0, 0) and not recwarn.list


def test_jobs_that_come_while_others_are_compiled(monkeypatch):
    """... have processes of their own, as many as there may be, also if only a few come at once"""
    both, made = threading.Barrier(2, timeout=10), []

    class Two:
        def __init__(self, cached):
            made.append(self)

        def compile(self, job):
            both.wait()  # for the other one, which comes later
            return job

        close = lambda self: None  # noqa: E731

    monkeypatch.setattr(workers, "Worker", Two)
    with workers.Team(3) as team:
        for job in "ab":
            team.begin([[job]])
        found = {}
        team.compile([["a"], ["b"]], found.__setitem__)
    assert found == {"a": "a", "b": "b"} and len(made) == 2


def test_a_failure_in_a_process(monkeypatch):
    """The first in the order asked for, as the same kind of error; no process stays"""
    jobs = [(code("nothing"), ARCHS[a], "cubin") for a in ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")]
    monkeypatch.setattr(compiling, "_key", lambda *job: digest.key(repr(job)))
    team = []
    init = workers.Worker.__init__
    monkeypatch.setattr(workers.Worker, "__init__", lambda self, *args: (init(self, *args), team.append(self))[0])
    with pytest.raises(CodegenError, match=r"kernel nothing for sm_75: KeyError"):
        many.emit(jobs, jobs=2)
    assert len(team) == 2 and all(w.process.poll() == 0 for w in team)
    worker = workers.Worker()
    worker.process.kill()
    with pytest.raises(CodegenError, match="the process that compiled kernel nothing for sm_75 ended with status"):
        worker.compile(jobs[0])
    worker.close()


@pytest.mark.parametrize("patient", [False, True])
def test_an_interrupt_ends_processes_at_once(patient, monkeypatch):
    """Also those that do not see a signal, as one that is in NVVM does not."""
    jobs = [(code("toy", n=n), ARCHS[a], "cubin") for n in (70, 71) for a in ("sm_75", "sm_80", "sm_86")]
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN);" if patient else ""
    command = [sys.executable, "-c", f"import signal, time; {deaf} time.sleep(60)"]
    team = []

    def init(self: workers.Worker, cached: bool) -> None:
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        team.append(self)
        if len(team) == 2:
            interrupt = signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]
            threading.Timer(1, *interrupt).start()

    monkeypatch.setattr(workers.Worker, "__init__", init)
    monkeypatch.setattr(compiling, "_key", lambda *job: digest.key(repr(job)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        many.emit(jobs, jobs=2)
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begin < 20
    assert [w.process.poll() for w in team] == [-signal.SIGKILL if patient else -signal.SIGTERM] * 2


SLEEPING = """
import subprocess
from tccompile.emit import ptxas, toolchain, workers
run = subprocess.run
subprocess.run = lambda command, **options: run(["sleep", "60"], **options)
toolchain.versions = lambda: None
toolchain.ptxas = lambda: "ptxas"
workers._receive = lambda stream: ("", "sm_80")
workers.compile_code = ptxas.assemble
workers.serve()
"""
"""A process whose ptxas takes a minute."""


def test_a_process_that_is_ended_leaves_no_files(tmp_path):
    worker = workers.Worker.__new__(workers.Worker)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command, environment = [sys.executable, "-c", SLEEPING], {**os.environ, "TMPDIR": str(tmp_path)}
    worker.process = subprocess.Popen(command, env=environment, process_group=0, **streams)
    while not list(tmp_path.glob("tccompile-*/kernel.ptx")):
        assert worker.process.poll() is None
        time.sleep(0.05)
    time.sleep(0.2)
    workers.stop([worker])
    assert worker.process.wait() == 0 and worker.process.stderr.read() == b""
    worker.close()
    assert list(tmp_path.iterdir()) == []


def test_what_spills_is_told_apart_when_the_rest_is_compiled():
    arch = ARCHS["sm_80"]
    fine, bad = (code("toy", n=3), arch, "cubin"), (code("toy", fault="spills"), arch, "cubin")
    with pytest.raises(SpillError) as caught:
        many.emit([bad, fine])
    assert caught.value.jobs == (bad,)


@pytest.mark.skipif(sys.platform == "win32", reason="programs end by signals on other systems")
def test_where_the_assembler_crashes_another_config_is_taken(monkeypatch, tmp_path):
    """As where code spills: it is no error in the kernel, and says nothing of others."""
    crashing = tmp_path / "ptxas"
    crashing.write_text("#!/bin/sh\nkill -SEGV $$\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(toolchain, "ptxas", lambda: str(crashing))
    with pytest.raises(SpillError, match=r"ptxas crashes on it \(signal 11\)"):
        ptxas.assemble(".version 8.0", "sm_90a")


class FakeWorker:
    """Compiles nothing: gives an image, or says that it spills."""

    def __init__(self, cached): ...

    def compile(self, job):
        return SpillError("it spills") if job[0] == code("toy", n=1) else image(job[1].name, job[2], "tc_toy")

    def close(self): ...


def test_what_spills_in_a_worker_is_told_apart_too(monkeypatch):
    arch = ARCHS["sm_80"]
    jobs = [(code("toy", n=n), arch, kind) for n in range(3) for kind in ("cubin", "ptx")]
    monkeypatch.setattr(workers, "Worker", FakeWorker)
    with pytest.raises(SpillError) as caught:
        many.emit(jobs, jobs=2)
    assert set(caught.value.jobs) == set(jobs[2:4])


def test_kernels_are_begun_before_it_is_known_which_are_wanted(monkeypatch):
    """None is compiled twice, and none that waits for its turn and is not wanted; who compiles one that is not is ended"""
    jobs = [(code("toy", n=n), ARCHS["sm_80"], "cubin") for n in range(2, 9)]
    made, stopped, goes, never = [], [], threading.Event(), threading.Event()

    class Waiting(FakeWorker):
        def compile(self, job):
            made.append(job)
            (never if job == jobs[0] else goes).wait()
            return super().compile(job)

    def stop(team):
        stopped.extend(team)
        never.set()

    monkeypatch.setattr(workers, "Worker", Waiting)
    monkeypatch.setattr(workers, "stop", stop)
    with many.team(2) as ahead:
        many.begin(jobs[:4], ahead)
        begin = ahead.begin
        monkeypatch.setattr(ahead, "begin", lambda groups: (begin(groups), goes.set()))
        images = many.emit(jobs[3:], jobs=2, ahead=ahead)
        assert list(images) == jobs[3:] and not stopped
    assert len(made) == len(set(made)) and jobs[0] in made and jobs[2] not in made
    assert len(stopped) == 2


@pytest.mark.parametrize("most", [1, 2])
def test_what_is_begun_needs_several_processes(monkeypatch, most):
    """... and more than a few kernels: else nothing is started"""
    monkeypatch.setattr(workers, "Worker", FakeWorker)
    jobs = [(code("toy", n=n), ARCHS["sm_80"], "cubin") for n in range(2, 2 + many.POOL_FROM - (most > 1))]
    with many.team(most) as ahead:
        many.begin(jobs, ahead)
        assert not ahead.started


@pytest.mark.parametrize(("most", "kept", "count"), [(1, False, 0), (3, False, 3), (3, True, 0), (20, False, many.EXPECTED)])
def test_processes_are_started_for_what_is_expected(monkeypatch, tmp_path, most, kept, count):
    """... where nothing is in the cache, so that whatever is chosen has to be compiled"""
    monkeypatch.setenv("TCCOMPILE_CACHE_DIR", str(tmp_path))
    made = []
    monkeypatch.setattr(workers, "Worker", lambda cached: made.append(FakeWorker(cached)) or made[-1])
    if kept:
        cache.put("ab" * 32, b"something")
    with many.team(most) as ahead:
        many.expect(ahead)
        assert len(made) == count
        ahead.begin([[(code("toy", n=2), ARCHS["sm_80"], "cubin")]])
        assert len(made) == max(count, 1)


def test_both_kinds_of_a_code_are_compiled_once(monkeypatch):
    calls = []
    whole = compiling.ptx_text
    monkeypatch.setattr(compiling, "ptx_text", lambda *args: calls.append(args) or whole(*args))
    cubin, ptx = (compile_code(code("toy", n=5), ARCHS["sm_80"], kind) for kind in ("cubin", "ptx"))
    assert len(calls) == 1 and cubin.kind == "cubin" and b".target sm_80" in ptx.code


# --- In less time ----------------------------------------------------------------------------------------------------


class Asking(Toy):
    """A toy that computes with what it reads of the generation, and asks Numba for a tanh that not all generations have."""

    name = "asking"

    def build(self, arch, n=1, fault=""):
        from tccompile.kernels.ptx.core import cuda, types

        add = 1 if arch.has(Feature.ASYNC_COPIES) else 2

        def kernel(x, count):
            values = cuda.shared.array(32, types.float32)
            values[cuda.threadIdx.x] = math.tanh(values[count]) + types.float32(add)

        return Function(kernel, types.void(types.uint64, types.int32), 128, fastmath=bool(n))


@pytest.mark.parametrize(
    ("name", "n", "builds"),
    [("toy", 3, ["sm_61"]), ("asking", 0, ["sm_61", "sm_80"]), ("asking", 1, ["sm_61", "sm_75", "sm_80"])],
)
def test_generations_share_what_is_alike(monkeypatch, name, n, builds):
    """A code is lowered once for all generations that give it the same, and comes out as if for each by itself"""
    monkeypatch.setattr(kernels, "KERNELS", (Toy(), Asking()))
    monkeypatch.setattr(numba._Asked, "questions", set())
    wanted, built, library = code(name, n=n), [], numba.library
    monkeypatch.setattr(numba, "library", lambda *args: built.append(args[1].name) or library(*args))
    compiling._lowerings.cache_clear()
    compiling._compiled.cache_clear()
    shared = [compiling._compiled(wanted, arch)[:2] for arch in ARCHS.values()]
    assert built == builds
    for arch, made in zip(ARCHS.values(), shared, strict=True):
        compiling._lowerings.cache_clear()
        compiling._compiled.cache_clear()
        assert compiling._compiled(wanted, arch)[:2] == made


@pytest.mark.parametrize(
    ("case", "name"), usually([("gemm_large", "gemm_mma"), ("depthwise_3x3", "depthwise"), ("mean_hw", "reduce")], 2)
)
def test_numba_gives_the_same_in_less_time(monkeypatch, case, name):
    """As the one that is not, which a Numba is where something is not found, and any that is not known"""
    quick = texts(case, name, ARCHS["sm_80"])
    from numba.cuda.core.inline_closurecall import InlineWorker

    monkeypatch.setattr(numba, "quick", lambda: nullcontext(False))
    assert texts(case, name, ARCHS["sm_80"]) == quick
    monkeypatch.undo()
    monkeypatch.delattr(InlineWorker, "inline_function")
    with numba.quick() as ready:
        assert not ready
    monkeypatch.undo()
    monkeypatch.setattr("numba_cuda.__version__", "0.31.0")
    with numba.quick() as ready:
        assert not ready


def loops(n: int, m: int) -> int:
    """A function with variables that are alive here and there."""
    total, last = 0, -1
    for i in range(n):
        part = i
        while part < m:
            if part == last:
                continue
            part = part * 2 + total
        total += part
        last = i if i > m else last
    return total


def test_what_is_alive_is_found_in_fewer_rounds():
    from numba.cuda.core import analysis, bytecode, interpreter

    identity = bytecode.FunctionIdentity.from_function(loops)
    blocks = interpreter.Interpreter(identity).interpret(bytecode.ByteCode(identity)).blocks
    graph, known = analysis.compute_cfg_from_blocks(blocks), analysis.compute_use_defs(blocks)
    asked = graph, blocks, known.usemap, known.defmap
    alive = quicker._compute_live_map(*asked)
    assert len(blocks) > 5 and any(alive.values()) and alive == analysis.compute_live_map(*asked)


def test_functions_of_one_text_keep_what_they_close_over():
    """Though their bytecode is read once"""
    from tccompile.kernels.ptx.core import cuda, f32, inline, types

    def kernel_of(added: float) -> Function:
        @inline
        def more(x):
            return f32(x + f32(added))

        def kernel(y):
            shared = cuda.shared.array(32, types.float32)
            shared[cuda.threadIdx.x] = more(shared[y])

        return Function(kernel, types.void(types.int32), 32)

    one, two, again = (ptx_text(kernel_of(n), ARCHS["sm_80"], "k") for n in (1.5, 3.0, 1.5))
    assert one == again != two and "0f3FC00000" in one and "0f40400000" in two


def insides() -> list[Any]:
    """What `quick` replaces, as it is now."""
    return [getattr(place.owner, place.name) for place in numba._places()]


def test_numba_is_as_it_was_whichever_thread_ends_first():
    """Two that compile at once: the second begins before the first ends, if it may, and ends after it"""
    before, second_is_in, first_is_out = insides(), threading.Event(), threading.Event()

    def second() -> None:
        with numba.quick():
            second_is_in.set()
            first_is_out.wait()

    thread = threading.Thread(target=second)
    with numba.quick() as ready:
        replaced = ready and insides() != before
        thread.start()
        alone = not second_is_in.wait(0.1)
    first_is_out.set()
    thread.join()
    assert replaced and alone and insides() == before
