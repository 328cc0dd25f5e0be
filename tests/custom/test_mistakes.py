"""What users do wrong: each message begins with the file and the line, and says what to do; and what a digest depends on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tccompile as tc
from tccompile.arch import ARCHS
from tccompile.cli.commands import tccompile as command
from tccompile.custom.digest import digest_of
from tccompile.custom.files import collected, using
from tccompile.emit.compile import compile_code
from tccompile.errors import OperatorError, TccompileError, UsageError
from tccompile.kernels.custom import CustomKernel
from tests.custom.common import OPERATORS, model_of, program_of
from tests.rewrites.common import Net

HEAD = "import math\nimport numpy as np\nimport tccompile as tc\nfrom numba import cuda, float32\n"
VALUES = '@tc.op("test::F", out=lambda x: x.like(), elementwise=True)\ndef f(x, by=1.0):\n    return {}  # here\n'
KERNEL = """@tc.op("test::F", out=lambda x: x.like(), grid=1, reference=lambda x, by=1.0: x{})
def f(x, by, y):
    {}  # here
"""


def net(**attributes: object) -> Net:
    made = Net(x=(4, 6))
    return made.out(made("F", "x", domain="test", **attributes))


def file(folder: Path, text: str) -> tuple[Path, int]:
    """A file of operators, and the line that is marked."""
    path = folder / "ops.py"
    path.write_text(HEAD + text)
    return path, next((i for i, line in enumerate((HEAD + text).splitlines(), 1) if "# here" in line), 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("math.sin(x)", "use tc's functions in place of math's"),
        ("np.sin(x)", "use tc's functions in place of NumPy's sin"),
        ("x if x > 0 else by", r"choose by tc\.where"),
        ("x[0]", "its neighbours cannot be read: that takes a kernel"),
        ("sum(x)", "there is nothing to go through"),
        ("x + undefined", "NameError: name 'undefined'"),
        ("tc.where(x, 1, 2)", "is a condition, such as x > 0"),
        ("tc.astype(x, 'float16')", "values are computed in float32, int64, bool"),
        ("tc.index(2)", "axis 2 of a result of rank 2"),
        ("x & 1", "bit_and takes no float32"),
    ],
)
def test_in_functions_of_values(tmp_path: Path, text: str, message: str) -> None:
    path, line = file(tmp_path, VALUES.format(text))
    with pytest.raises(OperatorError, match=rf"ops\.py:{line}: test::F: .*{message}.*\(node 'n0'\)"):
        program_of(net(), path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("y[0, 0] = undefined", "name 'undefined' is not defined$"),
        ("y[0, 0] = plain(by)", "name 'plain' is not defined; a kernel calls functions that are decorated"),
        ("y[0, 0] = x.nothing", "Unknown attribute 'nothing' of type"),
        ("x[0, 0] = by", "Cannot modify readonly array"),
        ("y[0, 0, 0] = by", "cannot index array"),
    ],
)
def test_in_kernels(tmp_path: Path, text: str, message: str) -> None:
    path, line = file(tmp_path, "def plain(a):\n    return a\n" + KERNEL.format("", text))
    program = program_of(net(), path)
    with using(collected([path])):
        work = CustomKernel().work(program.ops[-1], program, {}, ARCHS["sm_80"])
        with pytest.raises(OperatorError, match=rf"ops\.py:{line}: test::F for sm_80: .*{message}"):
            compile_code(work.launches[-1].code, ARCHS["sm_80"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KERNEL.format(", threads=2000", "pass"), "2000 threads a block; there are 1 to 1024"),
        (KERNEL.format(", scratch=lambda x: x", "pass"), "scratch= says what the parameter `scratch` is"),
        (KERNEL.format(", layout='nhwc'", "pass"), "layout='nhwc'"),
        (KERNEL.format("", "pass").replace("grid=1, ", ""), "needs grid=, and reference="),
        (KERNEL.format("", "pass").replace("by, y", "by"), "it would write nothing"),
        (VALUES.format("x").replace("test::F", "Relu"), "write domain::Name"),
        (VALUES.format("x").replace("test::F", "ai.onnx::Relu"), "write domain::Name"),
        (VALUES.format("x").replace("x, by=1.0", "*x"), r"\*args and \*\*kwargs stand for none"),
        (VALUES.format("x") + "f.on('sm_80', grid=1)(lambda x, by, y: None)", "is elementwise, and needs no kernel"),
        (KERNEL.format("", "pass") + "f.on('sm_8', grid=1)(lambda x, by, y: None)", "unknown GPU generation 'sm_8'"),
        (KERNEL.format("", "pass") + "f.on('sm_80', grid=1)(lambda x, by, z: None)", r"its first kernel writes \(y\)"),
        (
            KERNEL.format("", "pass")
            + "f.on('sm_80', grid=1)(f.on('sm_80', grid=1)(lambda x, by, y: None).programs[0].function)",
            "already",
        ),
        (VALUES.format("x") + "raise ValueError('no')", r"ops\.py:8: ValueError: no"),
        ("def f(:", r"ops\.py:5: SyntaxError"),
    ],
)
def test_where_operators_are_made(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OperatorError, match=rf"ops\.py:\d+: .*{message}|^.*{message}"):
        collected([file(tmp_path, text)[0]])


@pytest.mark.parametrize(
    ("text", "attributes", "message"),
    [
        (VALUES.format("x"), {"far": 1}, r"the node's attribute 'far' is none of \(x, by\)"),
        (VALUES.format("x"), {"x": 1}, "the node's attribute 'x' is an input of the node, too"),
        (VALUES.format("x").replace("by=1.0", "by"), {}, "the node gives no 'by', neither as an input nor as an attribute"),
        (VALUES.format("x").replace("x.like()", "x.shape"), {}, "give x.like"),
        (
            VALUES.format("x").replace("x.like()", "x.like((1 << 30, 1 << 30))"),
            {},
            "fewer than 2^40 are supported".replace("^", "."),
        ),
        (VALUES.format("x").replace("x.like()", "x.like((x.shape[0] / 2,))"), {}, "an output of extents"),
        (VALUES.format("x").replace("x.like()", "x.like(dtype='half')"), {}, "an output of type 'half'; choose from float32"),
        (VALUES.format("x").replace("x.like()", "x.like((2,))"), {}, "does not broadcast to its output"),
        (VALUES.format("x").replace("lambda x", "lambda z"), {}, "a rule of test::F asks for 'z'; there are x, by"),
        (VALUES.format("x").replace("x.like()", "x.lke()"), {}, r"ops\.py:5: test::F: AttributeError"),
        (VALUES.format("x, x"), {}, "it gives 2 values, and its rule says 1 outputs"),
        (VALUES.format("g(g(g(g(x))))") + "def g(x):\n    return x**3 + x**2 + x / (x**3 + 1)\n", {}, "write a kernel"),
        (KERNEL.format("", "pass").replace("1.0: x,", "1.0: x[0],").replace("by=1.0: x)", "by=1.0: x[0])"), {}, "its rule says"),
        (KERNEL.format("", "pass").replace("x.like()", "(x, x)"), {}, r"gives 2 outputs of test::F, and its kernel writes \(y\)"),
        (KERNEL.format("", "pass").replace("1.0: x)", "1.0: x / None)"), {}, "TypeError: unsupported operand"),
    ],
)
def test_where_nodes_do_not_fit(tmp_path: Path, text: str, attributes: dict[str, object], message: str) -> None:
    path, _ = file(tmp_path, text)
    with pytest.raises(OperatorError, match=message):
        program_of(net(**attributes), path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (", shared=1 << 20", "asks for 1048576 bytes of shared memory, and sm_61 has 49152"),
        (", scratch=None, shared=-1", "-1 bytes of shared memory"),
    ],
)
def test_what_gpus_have_not(tmp_path: Path, options: str, message: str) -> None:
    path, _ = file(tmp_path, KERNEL.format(options, "pass"))
    with pytest.raises(TccompileError, match=message):
        tc.compile(model_of(net()), archs=["sm_61"], ops=[path], precision="fp32")


def test_what_the_assembler_says(tmp_path: Path) -> None:
    lines = "s = cuda.shared.array(20000, float32)\n    s[cuda.threadIdx.x] = x[0, 0]\n    y[0, 0] = s[0]"
    path, _ = file(tmp_path, KERNEL.format("", lines))
    with pytest.raises(
        OperatorError, match=r"ops\.py:5: test::F for sm_61: .*too much shared data .*; beyond 48 KiB ask for it by"
    ):
        tc.compile(model_of(net()), archs=["sm_61"], ops=[path], precision="fp32")


@pytest.mark.parametrize("grid", ["0", "(1, 1, 1, 1)", "(1, 70000)", "'many'"])
def test_grids(tmp_path: Path, grid: str) -> None:
    path, _ = file(tmp_path, KERNEL.format("", "pass").replace("grid=1", f"grid={grid}"))
    with pytest.raises(OperatorError, match=r"ops\.py:5: test::F: a grid of"):
        tc.compile(model_of(net()), archs=["sm_61"], ops=[path], precision="fp32")


def test_what_is_given(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("x = 1\n")
    for given, message in (
        ([tmp_path / "none.py"], "none.py holds no operators"),
        ([tmp_path / "missing.py"], "cannot read the operators"),
        ([tmp_path / "ops.txt"], "cannot read the operators"),
        ([3], "3 holds no operators: give a Python file"),
        ("ops.py", r"ops is a list of files or modules, as \['ops.py'\]"),
        ([file(tmp_path, VALUES.format("x"))[0], tc.op("test::F", out=abs, elementwise=True)(lambda x: x)], "two operators are"),
    ):
        with pytest.raises(UsageError, match=message):
            collected(given)
    assert set(collected([OPERATORS, OPERATORS]).operators) == {
        f"test::{n}" for n in ("Spread", "Peak", "Names", "Ramp", "Parts")
    }


def test_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import onnx

    onnx.save(model_of(net()), tmp_path / "model.onnx")
    path, line = file(tmp_path, VALUES.format("math.sin(x)"))
    for asked in (["--check"], ["-o", str(tmp_path / "model.plan"), "--arch", "sm_80"]):
        with pytest.raises(SystemExit) as ended:
            command.main([str(tmp_path / "model.onnx"), "--ops", str(path), *asked], "tccompile")
        printed = "".join(capfd.readouterr())
        assert ended.value.code == OperatorError.exit_code and f"ops.py:{line}: test::F: TypeError" in printed, printed
    with pytest.raises(SystemExit) as ended:
        command.main([str(tmp_path / "model.onnx"), "--check"], "tccompile")
    assert ended.value.code == 3 and "--ops FILE.py" in "".join(capfd.readouterr())


# --- What a digest depends on ------------------------------------------------------------------------------------------

FIRST = "SCALE = 2\ndef helper(x):\n    return x * SCALE\ndef f(x):\n    return helper(x) + 1\n"


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("return helper", "# why\n    '''What.'''\n    return  helper", True),
        ("+ 1", "+ 2", False),
        ("SCALE = 2", "SCALE = 3", False),
        ("x * SCALE", "x / SCALE", False),
        ("def f(x)", "def f(x, k=1)", False),
    ],
)
def test_a_digest_is_of_what_functions_say(tmp_path: Path, before: str, after: str, same: bool) -> None:
    found = []
    for number, text in enumerate((FIRST, FIRST.replace(before, after))):
        path, scope = tmp_path / f"{number}.py", dict[str, object]()
        path.write_text(text)
        exec(compile(text, path, "exec"), scope)
        found.append(digest_of(scope["f"]))
    assert (found[0] == found[1]) == same


def test_a_digest_is_of_what_closures_hold() -> None:
    def made(k: object) -> str:
        return digest_of(lambda x: x * k)

    assert made(1) == made(1) != made(2)
    assert made(np.ones(3)) != made(np.zeros(3)) and made(np.sin) != made(np.cos)
    assert made(np.float32(1)) != made(np.float32(2)) and made({1}) != made({2})
    assert made(type("A", (), {"k": 1, "__module__": __name__})) != made(type("A", (), {"k": 2, "__module__": __name__}))


def test_a_digest_is_of_instructions() -> None:
    """The same Python means something else with another instruction."""
    from tccompile.kernels.ptx import mma

    def made(product: object) -> str:
        return digest_of(lambda a: product(a))  # type: ignore[operator]

    names = ("mma.m16n8k16", "mma.m16n8k16.bf16", "mma.m16n8k16")
    first, other, same = (made(mma.multiply_fragment(name)) for name in names)
    assert first == same != other and made(mma.halves) not in (first, other) and made(mma.store_word) != made(mma.store_chunk)
