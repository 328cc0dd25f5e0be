"""One class a cause, each with its exit code. Messages name the thing, the rule, the value and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class TccompileError(Exception):
    """A failure that the user can do something about. Of this class itself it is a bug of tccompile's."""

    exit_code = 70


class UsageError(TccompileError):
    """Options or arguments that do not make sense, or a file that cannot be read or written."""

    exit_code = 2


class UnsupportedError(TccompileError):
    """A valid model that asks for something that tccompile does not do."""

    exit_code = 3


class ModelError(TccompileError):
    """A model that is not valid ONNX."""

    exit_code = 4


BROKEN = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def blamed_on(what: str) -> Iterator[None]:
    """Raises what Python says of contradictions in a model (axes, extents that do not fit) as a ModelError about `what`, and of
    memory that runs out as a LaunchError."""
    try:
        yield
    except MemoryError as error:
        raise LaunchError(f"{what} takes more memory than there is{f': {error}' if str(error) else ''}") from error
    except BROKEN as error:
        says = next(iter(str(error).splitlines()), "") or "no more is known"
        raise ModelError(
            f"{what} contradicts itself or what it reads ({type(error).__name__}: {says}); if other tools run the model, "
            "this is a bug of tccompile: please report it"
        ) from error


class PlanError(TccompileError):
    """A plan file that is damaged, or of another format version."""

    exit_code = 5


class DeviceError(TccompileError):
    """There is no device that can run the plan."""

    exit_code = 6


class InputError(TccompileError):
    """An input whose name, shape or type does not fit the plan, or an output array."""

    exit_code = 7


class LaunchError(TccompileError):
    """Memory ran out, on the GPU or off it, or a launch failed."""

    exit_code = 8


class VerificationError(TccompileError):
    """A verification failed, a plan is none of those to trust, takes more than a budget, or does not hold for new weights."""

    exit_code = 9


class OperatorError(TccompileError):
    """Python of the user's that says what a custom operator is fails. The message begins with its file and line."""

    exit_code = 10


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports of what only an extra of tccompile brings: a ModuleNotFoundError says which."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed: pip install 'tccompile[{name}]'"
        raise ModuleNotFoundError(message, name=error.name) from error
