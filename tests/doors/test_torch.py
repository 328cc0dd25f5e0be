"""PyTorch's modules through `tccompile.torch`: structures, types, state, what is refused. On the CPU engine."""

from __future__ import annotations

import subprocess
import sys
from timeit import repeat

import pytest

from tccompile.errors import DeviceError, InputError, UnsupportedError, UsageError, VerificationError

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from torch import nn  # noqa: E402

from tccompile import dynamo  # noqa: E402
from tccompile.torch import Compiled  # noqa: E402
from tccompile.torch import compile as compiled  # noqa: E402


class Structured(nn.Module):
    """Takes tensors in a dictionary, a number and None; returns results in structures, one twice, and an input as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.register_buffer("shift", torch.ones(5))
        self.again = self.head

    def forward(self, x, more, times=1, nothing=None):
        mean = self.norm(self.conv(x)).relu().mean((2, 3))
        y = self.again(mean) + self.shift * more["shift"] * times
        return {"y": y, "parts": (mean, [y]), "nothing": nothing, "x": x}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True)

    def forward(self, ids, state=None):
        return self.lstm(self.table(ids), state)


class Normed(nn.Module):
    """Weights that are computed of others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)

    def forward(self, x):
        h = self.conv(x).transpose(1, 2)
        return self.attention(h, h, h)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=True, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


CASES = {
    "structures": (Structured, (torch.randn(2, 3, 8, 8), {"shift": torch.ones(5)}), {"times": 3}),
    "recurrent": (Recurrent, (torch.arange(14).reshape(2, 7),), {}),
    "computed weights": (Normed, (torch.randn(2, 4, 9),), {}),
    "transformer": (
        encoder,
        (torch.randn(2, 6, 16),),
        {"src_key_padding_mask": torch.arange(6)[None] > torch.tensor([[6], [3]])},
    ),
    "bfloat16": (lambda: nn.Linear(16, 4).bfloat16(), (torch.randn(3, 16).bfloat16(),), {}),
    "half": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten()).half(), (torch.randn(1, 3, 6, 6).half(),), {}),
}


def made(kind: str) -> tuple[nn.Module, tuple, dict, Compiled]:
    build, arguments, keywords = CASES[kind]
    torch.manual_seed(0)
    module = build().eval()
    return module, arguments, keywords, compiled(module, arguments, keywords, device="cpu")


def check(got, want) -> None:
    """The same structure, types and shapes, and values within fp16's error."""
    (a, one), (b, other) = torch.utils._pytree.tree_flatten(got), torch.utils._pytree.tree_flatten(want)
    assert one == other
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            assert float((x.double() - y.double()).norm()) <= 6e-3 * float(y.double().norm())


@pytest.mark.parametrize("kind", CASES)
def test_it_is_called_as_the_module_is_and_takes_its_weights(kind: str) -> None:
    module, arguments, keywords, fast = made(kind)
    with torch.no_grad():
        check(fast(*arguments, **keywords), module(*arguments, **keywords))
        before = module(*arguments, **keywords)
        for tensor in module.parameters():
            tensor.mul_(1 + 0.1 * torch.randn_like(tensor))
        fast.refit()
        after = module(*arguments, **keywords)
        check(fast(*arguments, **keywords), after)
        with pytest.raises(AssertionError):
            check(before, after)


def test_the_plan_runs_without_pytorch(tmp_path) -> None:
    fast = compiled(nn.Linear(4, 3).eval(), (torch.ones(1, 4),), device="cpu")
    fast.plan.save(tmp_path / "linear.plan")
    code = (
        "import sys, numpy, tccompile; s = tccompile.Session(sys.argv[1], 'cpu'); "
        "y, = s.run(None, {s.get_inputs()[0].name: numpy.ones((1, 4), 'float32')}); "
        "assert y.shape == (1, 3) and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "linear.plan")], check=True)


def test_open_extents_are_bound_by_entries() -> None:
    module = nn.Linear(4, 3).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    entries = [{"input": (n, 4)} for n in (2, 5)]
    options = {"dynamic_shapes": ({0: batch},), "device": "cpu", "archs": ["sm_80"], "entries": entries}
    fast = compiled(module, (torch.randn(2, 4),), **options)
    for n in (2, 5):
        check(fast(x := torch.randn(n, 4)), module(x).detach())
    with pytest.raises(InputError, match="it was compiled for input 2x4; or input 5x4"):
        fast(torch.randn(3, 4))


def test_open_extents_are_ranges() -> None:
    module = nn.Linear(4, 3).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    fast = compiled(module, (torch.randn(2, 4),), dynamic_shapes=({0: batch},), device="cpu")
    for n in (1, 2, 5, 64):
        check(fast(x := torch.randn(n, 4)), module(x).detach())
    with pytest.raises(InputError, match=r"the plan takes no input 65x4; it was compiled for input 1..64x4"):
        fast(torch.randn(65, 4))
    with pytest.raises(UsageError, match=r"the size .* has no end: give it one, as torch\.export\.Dim"):
        compiled(module, (torch.randn(2, 4),), dynamic_shapes=({0: torch.export.Dim("n")},), device="cpu")


@pytest.mark.parametrize(
    "call, why",
    [
        (lambda f, x, more: f(x), r"the arguments are \(…\), and the module was compiled for \(…, \{'shift': …\}, times=…\)"),
        (lambda f, x, more: f(x, more, times=4), "times is 4, and was 3 when the module was compiled"),
        (lambda f, x, more: f(x.double(), more, times=3), "input 'x' has type float32, got float64"),
        (lambda f, x, more: f(x[:1], more, times=3), "input 'x' has shape 2x3x8x8, got 1x3x8x8"),
        (lambda f, x, more: f(x.numpy(), more, times=3), "input 'x' is a ndarray; give a torch.Tensor"),
        (lambda f, x, more: f(x.clone().requires_grad_(), more, times=3), "asks for gradients, which do not pass through a plan"),
    ],
)
def test_other_arguments(call, why: str) -> None:
    _, arguments, _, fast = made("structures")
    with pytest.raises(InputError, match=why):
        call(fast, *arguments)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


class Of(nn.Module):
    """A function as a module."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "module, error, why",
    [
        (Counts(), UnsupportedError, "writes into its buffer 'calls', and a plan keeps nothing"),
        (Of(lambda x: x.mul_(2) + 1), UnsupportedError, "writes into its input 'x'"),
        (Of(lambda x: x if x.sum() > 0 else -x), UnsupportedError, "torch.export does not take the module: .*data-dependent"),
        (Of(lambda x: (x + 1, 3)), UnsupportedError, r"returns a number that is no tensor \(3\)"),
        (Of(torch.fft.fft), UnsupportedError, "is complex: take and return torch.view_as_real"),
        (Of(lambda x: x + torch.randn_like(x)), UnsupportedError, "draws values at random"),
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train(), UsageError, "in training mode"),
        (len, UsageError, "a builtin_function_or_method is no torch.nn.Module"),
    ],
)
def test_modules_that_are_no_plan(module, error: type, why: str) -> None:
    module = module.eval() if "training" not in why and isinstance(module, nn.Module) else module
    with pytest.raises(error, match=why):
        compiled(module, (torch.randn(2, 4),), device="cpu")


@pytest.mark.parametrize(
    "options, error, why",
    [
        ({"max_error": 1e-3, "device": "cpu"}, UsageError, r"there is no GPU here to build for: give archs, as \['sm_90a'\]"),
        ({"device": "tpu"}, UsageError, "unknown device 'tpu'; choose auto, cpu, gpu, or gpu:N"),
        (
            {"example_inputs": torch.ones(1, 4), "device": "cpu"},
            UsageError,
            r"example inputs are a tuple, as \(x,\), not a Tensor",
        ),
    ],
)
def test_other_options(options, error: type, why: str) -> None:
    with pytest.raises(error, match=why):
        compiled(nn.Linear(4, 3).eval(), **{"example_inputs": (torch.ones(1, 4),), **options})


def test_weights_that_do_not_fit() -> None:
    def fast(module: nn.Module) -> Compiled:
        return compiled(module, (torch.ones(1, 3),), device="cpu")

    shared = nn.Linear(3, 3)
    module = nn.Sequential(shared, nn.ReLU(), shared).eval()
    tied = fast(module)
    module[0] = nn.Linear(3, 3)
    with pytest.raises(UsageError, match=r"'0.weight' and '2.weight' were one weight when the module was compiled, and differ"):
        tied.refit()
    module = nn.Linear(3, 3).eval()
    refitted = fast(module)
    with torch.no_grad():
        module.weight.mul_(100)
    with pytest.raises(VerificationError, match=r"the weight 'weight': values up to .* compile the model with these weights"):
        refitted.refit()
    module.weight = nn.Parameter(torch.ones(3, 5))
    with pytest.raises(UsageError, match=r"is float32 \(3, 3\) in the plan, the new one float32 \(3, 5\)"):
        refitted.refit()
    del module.weight
    with pytest.raises(UsageError, match="the module has no weight 'weight' any more"):
        refitted.refit()


def test_a_call_costs_little_more_than_the_session_s() -> None:
    """25 µs at most on a machine that does nothing else (docs/guide/pytorch.md); here others may take its time."""
    x = torch.randn(1, 4)
    fast = compiled(nn.Linear(4, 4).eval(), (x,), device="cpu")
    feeds = {fast.session.get_inputs()[0].name: x.numpy()}
    alone, through = (
        min(repeat(f, number=500, repeat=9)) / 500 * 1e6 for f in (lambda: fast.session.run(None, feeds), lambda: fast(x))
    )
    assert through - alone < 100


# --- torch.compile ---------------------------------------------------------------------------------------------------


def through_backend(module, monkeypatch: pytest.MonkeyPatch, count: list[int]):
    """A module by torch.compile, and how many plans it makes."""
    monkeypatch.setattr(dynamo, "compile", lambda *a, **k: (count.append(1), compiled(*a, **k))[1])
    torch._dynamo.reset()
    return torch.compile(module, backend=dynamo.backend, options={"device": "cpu"})


def broken(x):
    y = (x @ x.T).relu()
    torch._dynamo.graph_break()
    return {"y": y - 1, "x": x}


BY_BACKEND = {
    "several sizes": (nn.Linear(4, 3), [(torch.randn(n, 4),) for n in (2, 3, 5)], 3),
    "what PyTorch divides": (Of(broken), [(torch.randn(2, 4),)], 2),
    "a branch on values": (Of(lambda x: x * 2 if x.sum() > 0 else -x), [(torch.ones(2, 4),), (-torch.ones(2, 4),)], 3),
    "a size as a number": (Of(lambda x: x * x.shape[0]), [(torch.randn(n, 4),) for n in (2, 3)], 2),
    "not contiguous": (nn.Linear(4, 3), [(torch.randn(4, 5).T,)], 1),
    "buffers": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), [(torch.randn(1, 3, 5, 5),)], 1),
}


@pytest.mark.parametrize("kind", BY_BACKEND)
def test_parts_that_pytorch_captures_are_plans(
    kind: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    module, calls, plans = BY_BACKEND[kind]
    fast = through_backend(module.eval(), monkeypatch, count := [])
    with torch.no_grad():
        for arguments in calls:
            check(fast(*arguments), module(*arguments))
    assert len(count) == plans
    assert not [w for w in recwarn if "runs a part" in str(w.message)]


def test_a_range_is_one_plan_and_weights_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(4, 3).eval()
    fast = through_backend(module, monkeypatch, count := [])
    x = torch.randn(2, 4)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    with torch.no_grad():
        for n in (2, 3, 64):
            given = x if n == 2 else torch.randn(n, 4)
            check(fast(given), module(given))
        module.weight.mul_(1.1)
        check(fast(x), module(x))
        module.bias = nn.Parameter(module.bias * 1.5)
        check(fast(x), module(x))
    assert len(count) == 1


@pytest.mark.parametrize(
    "module, why, grad",
    [
        (Of(lambda x: (x.mul_(2) + 1, x)), "writes into its input", False),
        (Of(torch.fft.fft), "is complex", False),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "writes into its buffer", False),
        (nn.Linear(4, 4), r"gradients are asked for, .* call it in torch.no_grad\(\)", True),
    ],
)
def test_what_is_no_plan_pytorch_runs_itself(module, why: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = through_backend(module.train(), monkeypatch, []), torch.randn(3, 4)
    with torch.set_grad_enabled(grad), pytest.warns(RuntimeWarning, match=f"PyTorch runs a part of the module itself: .*{why}"):
        check(fast(x.clone()), module(x.clone()))


@pytest.mark.gpu
def test_tensors_stay_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    module, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval().cuda(), torch.randn(4, 32, device="cuda")
    try:
        fast = compiled(module, (x,), device="gpu")
    except DeviceError as error:
        pytest.skip(str(error))
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        busy = torch.randn(2000, 2000, device="cuda")
        scaled = x * (1 + 0 * (busy @ busy).sum())
        got, want = fast(scaled), module(scaled)
        assert got.device == x.device
        check((got + 0).cpu(), want.cpu())
