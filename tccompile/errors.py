"""One class a cause, each with its exit code. Messages name the thing, the rule, the value and the way out."""

from __future__ import annotations


class TccompileError(Exception):
    """A failure that the user can do something about; the command line prints it without a traceback."""

    exit_code = 70


class UsageError(TccompileError):
    """Options or arguments that do not make sense."""

    exit_code = 2


class UnsupportedError(TccompileError):
    """A valid model that asks for something that tccompile does not do."""

    exit_code = 3


class ModelError(TccompileError):
    """A model that is not valid ONNX."""

    exit_code = 4


class PlanError(TccompileError):
    """A plan file that is corrupt, or of another format version."""

    exit_code = 5


class DeviceError(TccompileError):
    """No device can run the plan."""

    exit_code = 6


class InputError(TccompileError):
    """An input that does not fit the plan."""

    exit_code = 7


class LaunchError(TccompileError):
    """The GPU ran out of memory, or a launch failed."""

    exit_code = 8


class VerificationError(TccompileError):
    """Results are not what they should be."""

    exit_code = 9
