"""The commands tccompile, tcrun, tcinspect and tcrefit, each in a module of its name: parse, call, print.

Results go to stdout, progress and errors to stderr. How a command fails is in `command`.
"""

from tccompile.cli.tccompile import tccompile
from tccompile.cli.tcinspect import tcinspect
from tccompile.cli.tcrefit import tcrefit
from tccompile.cli.tcrun import tcrun

__all__ = ["tccompile", "tcinspect", "tcrefit", "tcrun"]
