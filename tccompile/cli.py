"""The commands tccompile, tcrun and tcinspect: parse, call, print.

Results go to stdout, progress and errors to stderr. Every failure ends in one short block and the exit code of its class in
`errors`; what is not one of those is a bug of ours: exit code 70, with a file to send.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tccompile.errors import InputError, TccompileError, UsageError


class Command(click.Command):
    """A command whose failures are messages and exit codes, never tracebacks."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                super().main(args, prog_name or self.name, standalone_mode=False, **extra)
        except click.exceptions.Exit as stop:
            sys.exit(stop.exit_code)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            _fail("stopped")
            sys.exit(130)
        except TccompileError as error:
            _fail(str(error))
            if error.exit_code == TccompileError.exit_code:
                _fail(f"this is a bug of tccompile's; please send {_bug_report()}")
            sys.exit(error.exit_code)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except OSError as error:
            _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
            sys.exit(UsageError.exit_code)
        except Exception as error:
            _fail(f"{type(error).__name__}: {error}\nthis is a bug of tccompile's; please send {_bug_report()}")
            sys.exit(TccompileError.exit_code)
        sys.exit(0)


def _fail(message: str) -> None:
    click.echo(f"error: {message}", err=True)


def _show_warning(message: Any, *_: Any) -> None:
    click.echo(f"warning: {message}", err=True)


def _bug_report() -> str:
    """Write what we know of the failure being handled into a file; its path."""
    import platform

    from tccompile import __version__

    with tempfile.NamedTemporaryFile("w", prefix="tccompile-bug-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(f"tccompile {__version__}, Python {platform.python_version()}, {platform.platform()}\n")
        file.write(f"{' '.join(sys.argv)}\n\n{traceback.format_exc()}")
    return file.name


FILE = click.Path(dir_okay=False, path_type=Path)
EXISTING = click.Path(exists=True, dir_okay=False, path_type=Path)


# --- tccompile -------------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("model", type=EXISTING)
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="The plan to write; default: MODEL.plan here."
)
@click.option(
    "--shape", "shape_texts", multiple=True, metavar="NAME=1x3x224x224", help="Shape of one model input; repeat for others."
)
@click.option(
    "--entry", "entry_texts", multiple=True, metavar="x=1x3x224x224,y=1x10", help="One set of input shapes; repeat for more."
)
@click.option("--arch", default="all", show_default=True, metavar="sm_80,sm_90a,…|all", help="GPU generations to build for.")
@click.option("--precision", type=click.Choice(["fp16", "fp32"]), default="fp16", show_default=True, help="Storage of tensors.")
@click.option("--strip-weights", is_flag=True, help="Leave large weights out; tcrun --weights MODEL fills them in.")
@click.option("--check", is_flag=True, help="List what is not supported, and write nothing.")
@click.option("--explain", is_flag=True, help="Print which kernel runs each step, and why.")
@click.option("--dump", type=click.Path(file_okay=False, path_type=Path), help="Write every stage into this folder.")
@click.option("-j", "--jobs", type=click.IntRange(1), help="Processes that compile kernels; default: one a core.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
@click.option("-v", "--verbose", is_flag=True, help="Print what each stage did.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.version_option(package_name="tccompile")
def tccompile(
    model: Path,
    output: Path | None,
    shape_texts: Sequence[str],
    entry_texts: Sequence[str],
    arch: str,
    precision: str,
    strip_weights: bool,
    check: bool,
    explain: bool,
    dump: Path | None,
    jobs: int | None,
    quiet: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Compile an ONNX model into a plan. Needs no GPU."""
    from tccompile.options import Options, parse_archs, parse_entry, parse_shape

    if shape_texts and entry_texts:
        raise UsageError("--shape binds the inputs of the only entry; with --entry, give all shapes there")
    entries = tuple(map(parse_entry, entry_texts)) or (dict(map(parse_shape, shape_texts)),)
    options = Options(entries, parse_archs(arch), precision, strip_weights, dump, jobs)
    _need_compiler()
    from tccompile import report
    from tccompile.pipeline import check as check_model
    from tccompile.pipeline import compile_model
    from tccompile.plan import write_plan

    if check:
        _print_check(check_model(model, options), as_json)
        return
    output = output or Path(model.stem + ".plan")
    with _progress(quiet, verbose) as progress:
        plan = compile_model(model, options, progress)
        write_plan(plan, output)
    sections = report.explain(plan) if explain else []
    summary = {"plan": str(output), "bytes": output.stat().st_size, **report.inspect(plan)}
    if as_json:
        click.echo(json.dumps(summary | ({"explain": sections} if explain else {}), ensure_ascii=False))
        return
    if explain:
        click.echo(report.explain_text(sections))
    if not quiet:
        click.echo(f"{output}: {report.size_text(summary['bytes'])}" + (f"\n{report.inspect_text(summary)}" if verbose else ""))


def _need_compiler() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("onnx", "onnx_graphsurgeon", "numba", "numba_cuda", "rich") if find_spec(name) is None]
    if missing:
        raise UsageError(f"compiling needs {', '.join(missing)}; install them with: pip install 'tccompile[compiler]'")


def _print_check(problems: Sequence[Any], as_json: bool) -> None:
    """The nodes that are not supported; exit code 3 if there are any."""
    if as_json:
        click.echo(json.dumps([vars(p) for p in problems], ensure_ascii=False, default=str))
    else:
        for p in problems:
            click.echo(f"{p.node} ({p.op}, {p.shapes}): {p.reason}; {p.way_out}")
        click.echo(f"{len(problems)} nodes are not supported" if problems else "every node is supported")
    if problems:
        raise click.exceptions.Exit(3)


class _progress:
    """Progress on stderr: a bar on a terminal, a line a stage with --verbose, nothing with --quiet."""

    def __init__(self, quiet: bool, verbose: bool):
        self.verbose, self.stage = verbose, ""
        self.bar: Any = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("", total=None)

    def __enter__(self) -> _progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self.verbose and stage != self.stage:
            click.echo(stage, err=True)
        self.stage = stage
        if self.bar:
            self.bar.update(self.task, description=stage, completed=done, total=total)


# --- tcrun -----------------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("plan", type=EXISTING)
@click.argument("input_file", metavar="INPUT", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="OUT.npy for one output, OUT.npz for several."
)
@click.option("--device", default="auto", show_default=True, metavar="auto|gpu|gpu:N|cpu", help="Where to run.")
@click.option("--target", metavar="sm_80", help="Run this generation's section of the plan.")
@click.option(
    "--weights", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The model that fills a stripped plan."
)
@click.option("--check-finite", is_flag=True, help="On the CPU engine: name the first tensor that leaves fp16's range.")
@click.option("--bench", is_flag=True, help="Measure latency and throughput.")
@click.option("--iterations", type=click.IntRange(1), default=200, show_default=True, help="Inferences that --bench measures.")
@click.option("-q", "--quiet", is_flag=True, help="Print results and errors only.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.version_option(package_name="tccompile")
def tcrun(
    plan: Path,
    input_file: Path,
    output: Path | None,
    device: str,
    target: str | None,
    weights: Path | None,
    check_finite: bool,
    bench: bool,
    iterations: int,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run a plan on INPUT: OUT.npy for a model with one input, or an .npz with an array per input name."""
    import numpy as np

    from tccompile.plan import fill, read_plan
    from tccompile.runtime.session import Session

    loaded = read_plan(plan)
    if weights is not None:
        _need_compiler()
        from tccompile.load import sources

        loaded = fill(loaded, sources(weights))
    if check_finite and device == "auto":
        device = "cpu"
    with Session(loaded, device=device, target=target, check_finite=check_finite) as session:
        if not quiet and not as_json:
            click.echo(f"on {session.describe()}", err=True)
        feeds = _read_feeds(input_file, [i.name for i in session.get_inputs()])
        names = [o.name for o in session.get_outputs()]
        outputs = dict(zip(names, session.run(None, feeds), strict=True))
        times = session.bench(iterations, feeds) if bench else None
        where = session.describe()
    if output is not None:
        _write_outputs(output, outputs)
    result: dict[str, Any] = {"device": where, "outputs": [_summary(n, v) for n, v in outputs.items()]}
    if times is not None:
        median, p90, p99 = (float(np.percentile(times, q)) for q in (50, 90, 99))
        result["bench"] = {
            "median_ms": median,
            "p90_ms": p90,
            "p99_ms": p99,
            "per_second": 1000 / median,
            "iterations": len(times),
        }
    if as_json:
        click.echo(json.dumps(result))
        return
    if output is None:
        for o in result["outputs"]:
            click.echo(f"{o['name']}: {o['dtype']}[{', '.join(map(str, o['shape']))}]  {o['text']}")
    if times is not None:
        click.echo(
            "median {median_ms:.3f} ms, p90 {p90_ms:.3f}, p99 {p99_ms:.3f}; {per_second:.1f} inferences a second".format(
                **result["bench"]
            )
        )


def _read_feeds(path: Path, names: Sequence[str]) -> dict[str, Any]:
    import numpy as np

    try:
        data = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"{path} is not a .npy or .npz file of plain arrays: {error}") from None
    if isinstance(data, np.ndarray):
        if len(names) != 1:
            raise InputError(f"the model has {len(names)} inputs ({', '.join(names)}): give an .npz with an array for each")
        return {names[0]: data}
    try:
        return {name: data[name] for name in data.files}
    except (ValueError, EOFError, OSError) as error:
        raise InputError(f"{path} holds an array that cannot be read: {error}") from None


def _write_outputs(path: Path, outputs: dict[str, Any]) -> None:
    """Write the file whole or not at all."""
    import numpy as np

    if path.suffix != ".npz" and len(outputs) > 1:
        raise UsageError(
            f"the model has {len(outputs)} outputs ({', '.join(outputs)}): write them with -o {path.with_suffix('.npz')}"
        )
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            if path.suffix == ".npz":
                np.savez(file, **outputs)
            else:
                np.save(file, next(iter(outputs.values())))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _summary(name: str, value: Any) -> dict[str, Any]:
    import numpy as np

    out: dict[str, Any] = {"name": name, "shape": list(value.shape), "dtype": str(value.dtype), "text": "empty"}
    if value.size:
        v = value.astype(np.float64)
        finite = v[np.isfinite(v)]
        low, high, mean = (float(f(finite)) for f in (np.min, np.max, np.mean)) if finite.size else (float("nan"),) * 3
        out |= {"min": low, "max": high, "mean": mean, "not_finite": int(v.size - finite.size)}
        out["text"] = f"min {low:.6g}, max {high:.6g}, mean {mean:.6g}"
        if out["not_finite"]:
            out["text"] += f", {out['not_finite']} not finite"
    return out


# --- tcinspect -------------------------------------------------------------------------------------------------------


@click.command(cls=Command)
@click.argument("plan", type=EXISTING)
@click.option("--steps", is_flag=True, help="Also print each section's steps, as tccompile --explain does.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
@click.version_option(package_name="tccompile")
def tcinspect(plan: Path, steps: bool, as_json: bool) -> None:
    """Print what is in a plan."""
    from tccompile import report
    from tccompile.plan import read_plan

    loaded = read_plan(plan)
    data = {"plan": str(plan), "bytes": plan.stat().st_size, **report.inspect(loaded)}
    sections = report.explain(loaded) if steps else []
    if as_json:
        click.echo(json.dumps(data | ({"explain": sections} if steps else {}), ensure_ascii=False))
        return
    click.echo(f"{plan}: {report.size_text(data['bytes'])}\n{report.inspect_text(data)}")
    if steps:
        click.echo(report.explain_text(sections))
