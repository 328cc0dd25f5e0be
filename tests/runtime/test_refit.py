"""Weights and adapters swapped under a session, on the CPU engine and on a GPU made of host memory."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import tccompile
from tccompile.errors import LaunchError, UsageError, VerificationError
from tccompile.ir.weights import Source, digest
from tccompile.plan.file import Plan, read_plan
from tccompile.plan.format import Held, Origin
from tccompile.refit.lora import Adapter, merged, places
from tccompile.refit.plan import refitted
from tccompile.runtime.session import Session
from tests.refit.common import KINDS, attention, feeds, outputs, plan_of, products, tuned, weights, write_safetensors
from tests.runtime.test_session import ILLEGAL_ADDRESS, WEIGHT, expected, fake, plan, same, x_of

__all__ = ["fake"]  # the fixture


# --- On the CPU ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_swapped_and_come_back(kind: str) -> None:
    old = KINDS[kind]().model()
    made, new = plan_of(old), tuned(old)
    with Session(made, "cpu") as session, Session(made, "cpu") as other:
        before = session.run(None, feeds(made))
        session.refit(weights(new))
        same(session.run(None, feeds(made)), outputs(refitted(made, weights(new))))
        same(other.run(None, feeds(made)), before)
        session.refit(weights(old))
        same(session.run(None, feeds(made)), before)
        same(outputs(made), before)


def test_a_session_that_refuses_weights_keeps_its_own() -> None:
    old = products().model()
    made, w = plan_of(old), weights(old)
    with Session(made, "cpu") as session:
        before = session.run(None, feeds(made))
        with pytest.raises(VerificationError, match="'w2': values up to"):
            session.refit(weights(tuned(old)) | {"w2": 100 * w["w2"]})
        with pytest.raises(UsageError, match=r"not as a list"):
            session.refit([w["w2"]])  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="'w2' cannot be read as a NumPy array"):
            session.refit({"w2": _OnGpu()})
        same(session.run(None, feeds(made)), before)
    with pytest.raises(UsageError, match="closed"):
        session.refit(w)


class _OnGpu:
    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("it lies on cuda:0")


def test_weights_of_a_model_that_has_more(tmp_path: Path) -> None:
    """Those that nothing reads may be anything."""
    import onnx

    n = products()
    n.weights.append(onnx.numpy_helper.from_array(np.ones(3, np.float32), "unused"))
    onnx.save(n.model(), tmp_path / "model.onnx")
    made = plan_of(n.model())
    with Session(made, "cpu") as session:
        given = tccompile.weights(tmp_path / "model.onnx")
        session.refit({name: values * (2 if name == "unused" else 1) for name, values in given.items()})


# --- Adapters --------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(5)


def adapters(folder: Path, name: str, *modules: str) -> Path:
    arrays = {}
    for module in modules:
        arrays[f"{module}.lora_A.weight"] = RNG.standard_normal((2, 16)).astype(np.float32) * 0.1
        arrays[f"{module}.lora_B.weight"] = RNG.standard_normal((16, 2)).astype(np.float32) * 0.1
    return write_safetensors(folder / f"{name}.safetensors", arrays)


def test_adapters_are_swapped_and_taken_out(tmp_path: Path) -> None:
    old = attention().model()
    made, base = plan_of(old), weights(old)
    named = [place.weight for place in places([made.entries[0].program])]
    one, two = adapters(tmp_path, "one", named[0], named[1]), adapters(tmp_path, "two", named[1], named[3])
    with Session(made, "cpu") as session:
        before = session.run(None, feeds(made))
        session.lora(one, 0.5, base=base)
        first = session.run(None, feeds(made))
        same(first, outputs(refitted(made, base | merged_of(made, base, one, 0.5))))
        session.lora(two)
        second = session.run(None, feeds(made))
        same(second, outputs(refitted(made, base | merged_of(made, base, two, 1.0))))
        assert not np.array_equal(first[0], second[0])
        with pytest.raises(UsageError, match=r"take them out first, with lora\(None\)"):
            session.refit(base)
        session.lora(one, 0.5)
        same(session.run(None, feeds(made)), first)
        session.lora(None)
        same(session.run(None, feeds(made)), before)
        session.refit(base)


def merged_of(made: Plan, base: dict[str, np.ndarray], path: Path, scale: float) -> dict[str, np.ndarray]:
    from tccompile.refit.lora import read_adapters

    return merged(base, places([made.entries[0].program]), read_adapters(path), scale)


def test_adapters_take_the_weights_that_the_session_has(tmp_path: Path) -> None:
    old = products().model()
    made, base = plan_of(old), weights(old)
    file = adapters(tmp_path, "one", "w0")
    with Session(made, "cpu") as session:
        before = session.run(None, feeds(made))
        with pytest.raises(UsageError, match=r"takes the weight 'w0' without them: give base"):
            session.lora(file)
        with pytest.raises(UsageError, match="the base's weight 'w0' is not what the session has"):
            session.lora(file, base=weights(tuned(old)))
        with pytest.raises(VerificationError, match="'w0': values up to"):
            session.lora(file, 1e3, base=base)
        same(session.run(None, feeds(made)), before)
        session.lora(None)
        session.refit(weights(tuned(old)))
        session.lora(file, base=write_safetensors(tmp_path / "base.safetensors", weights(tuned(old))))
        session.lora(None)
        session.refit(base)
        same(session.run(None, feeds(made)), before)


def test_adapters_with_a_map(tmp_path: Path) -> None:
    old = products().model()
    made, base = plan_of(old), weights(old)
    (tmp_path / "names.json").write_text('{"w2": "decoder.out"}')
    with Session(made, "cpu") as session:
        session.lora(adapters(tmp_path, "one", "decoder.out"), base=base, names=tmp_path / "names.json")
        assert session._adapters.now.weights == {"w2"}


def test_adapters_of_weights_that_others_are_folded_into(tmp_path: Path) -> None:
    """A convolution's weights are one constant with the normalization behind it: the base has those, too."""
    old = KINDS["convolutions"]().model()
    made, base = plan_of(old), weights(old)
    arrays = {"n0.lora_A.weight": np.full((1, 8, 3, 3), 0.02, np.float32), "n0.lora_B.weight": np.ones((16, 1, 1, 1), np.float32)}
    file = write_safetensors(tmp_path / "a.safetensors", arrays)
    with Session(made, "cpu") as session:
        before = session.run(None, feeds(made))
        session.lora(file, base=base)
        adapted = base | {"w0": base["w0"] + np.float32(0.02)}
        same(session.run(None, feeds(made)), outputs(refitted(made, adapted)))
        session.lora(None)
        same(session.run(None, feeds(made)), before)


def test_the_factor_is_alpha_over_rank() -> None:
    old = products().model()
    down, up = np.ones((2, 16), np.float32), np.ones((16, 2), np.float32)
    made = merged(weights(old), places([plan_of(old).entries[0].program]), [Adapter("w0", down, up, 0.25)], 2.0)
    np.testing.assert_allclose(made["w0"], weights(old)["w0"] + 1.0, rtol=1e-6)


# --- On a GPU --------------------------------------------------------------------------------------------------------


def with_source(rows: tuple[int, ...] = (2,)) -> Plan:
    """The toy plan, whose weight is the model's."""
    made = plan(rows=rows)
    entries = tuple(
        replace(e, program=replace(e.program, constants={"w": Source("bias", (3,), "float32")})) for e in made.entries
    )
    held = Held(float(WEIGHT.max()), float(np.linalg.norm(WEIGHT)))
    return replace(made, entries=entries, origin=Origin({"bias": digest(WEIGHT)}, nodes=("00",), held={"w": held}))


NEW = np.array([-2.0, 5.0, 7.0], np.float32)


def of_new(x: np.ndarray) -> list[np.ndarray]:
    return [2 * (x + NEW), -(x + NEW)]


def test_on_a_gpu_addresses_stay(fake) -> None:
    api = fake()
    with Session(with_source(), "gpu") as session:
        same(session.run(None, {"x": x_of()}), expected(x_of()))
        built = api.calls.count("cuGraphInstantiateWithParams"), api.calls.count("cuMemAlloc")
        session.refit({"bias": NEW})
        same(session.run(None, {"x": x_of()}), of_new(x_of()))
        session.refit({"bias": WEIGHT})
        same(session.run(None, {"x": x_of()}), expected(x_of()))
        assert built == (api.calls.count("cuGraphInstantiateWithParams"), api.calls.count("cuMemAlloc"))


def test_what_is_queued_ends_before_weights_change(fake) -> None:
    api = fake()
    with Session(with_source(), "gpu") as session:
        begin = len(api.calls)
        session.refit({"bias": NEW})
        calls = [c for c in api.calls[begin:] if c in ("cuCtxSynchronize", "cuMemcpyHtoD")]
        assert calls == ["cuCtxSynchronize", "cuMemcpyHtoD", "cuCtxSynchronize"]


def test_entries_that_are_loaded_later_have_the_new_weights(fake) -> None:
    fake()
    for device in ("gpu", "cpu"):
        with Session(with_source((2, 4)), device) as session:
            session.refit({"bias": NEW})
            same(session.run(None, {"x": x_of(4)}), of_new(x_of(4)))
            session.refit({"bias": WEIGHT})
            for rows in (2, 4):
                same(session.run(None, {"x": x_of(rows)}), expected(x_of(rows)))


def test_no_session_changes_under_another_one(fake, tmp_path: Path) -> None:
    fake()
    path = tmp_path / "m.plan"
    with_source().save(path)
    with Session(path, "gpu") as one:
        with Session(path, "gpu") as two:
            with pytest.raises(UsageError, match=r"another session of the same plan .* Session\(tccompile.Plan.load\(path\)\)"):
                one.refit({"bias": NEW})
            same(one.run(None, {"x": x_of()}), expected(x_of()))
            with Session(read_plan(path), "gpu") as own:
                own.refit({"bias": NEW})
                same(two.run(None, {"x": x_of()}), expected(x_of()))
        one.refit({"bias": NEW})
        with Session(path, "gpu") as later:
            same(later.run(None, {"x": x_of()}), expected(x_of()))
            same(one.run(None, {"x": x_of()}), of_new(x_of()))
        one.refit({"bias": WEIGHT})
        same(one.run(None, {"x": x_of()}), expected(x_of()))


def test_a_gpu_that_fails_says_so(fake) -> None:
    api = fake()
    with Session(with_source(), "gpu") as session:
        api.failures["cuMemcpyHtoD"] = ILLEGAL_ADDRESS
        with pytest.raises(LaunchError, match="new weights cannot be copied to"):
            session.refit({"bias": NEW})
        api.failures.clear()


def test_checks_of_values_read_the_new_weights(fake) -> None:
    fake()
    with Session(with_source(), "gpu", check_finite=True) as session:
        session.refit({"bias": NEW})
        same(session.run(None, {"x": x_of()}), of_new(x_of()))


def test_threads_see_old_or_new_weights_and_nothing_between(fake) -> None:
    fake()
    with Session(with_source(), "gpu") as session:
        seen: list[list[np.ndarray]] = []

        def run() -> None:
            for _ in range(50):
                seen.append(session.run(None, {"x": x_of()}))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for i in range(50):
            session.refit({"bias": NEW if i % 2 == 0 else WEIGHT})
        for thread in threads:
            thread.join()
        choices = [expected(x_of()), of_new(x_of())]
        assert all(any(all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)) for want in choices) for got in seen)
