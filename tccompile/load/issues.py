"""What stands against compiling a node, as data: one of them is an error, all of them are what `tccompile --check` lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tccompile.errors import ModelError, TccompileError, UnsupportedError
from tccompile.terminal import plain


@dataclass(frozen=True)
class Issue:
    """Why a node of the user's model, an input ("Input") or an output ("Output") cannot be compiled.

    outputs  the tensors that the node writes, as the stage knows them that refuses it; of an input or output, that tensor
    invalid  the node is not what the standard asks for
    open     an input, of whose shape the user has to say more
    """

    node: str
    op: str
    shapes: tuple[tuple[int, ...], ...]  # of its inputs
    reason: str
    way_out: str
    domain: str = ""
    outputs: tuple[str, ...] = ()
    invalid: bool = False
    open: bool = False

    @property
    def title(self) -> str:
        op = f"{self.domain}.{self.op}" if self.domain else self.op
        shapes = ", ".join("×".join(map(str, s)) or "scalar" for s in self.shapes)
        return f"{op} of {shapes}" if shapes else op

    def __str__(self) -> str:
        return plain(f"{self.node} ({self.title}): {'; '.join(filter(None, (self.reason, self.way_out)))}")


class Refusal(UnsupportedError):
    """A node that cannot be compiled, and why."""

    def __init__(self, issue: Issue) -> None:
        super().__init__(str(issue))
        self.issue = issue


@dataclass
class Findings:
    """What a look at a whole model finds.

    issues     one for each node
    masked     nodes of which nothing can be said but by their operator, since what they read is unknown for another node's sake
    constants  tensors that do not depend on inputs
    """

    issues: list[Issue] = field(default_factory=list)
    masked: list[Issue] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)

    def add(self, error: TccompileError, what: Issue, called: str) -> None:
        """An error about something, which it calls by `called`."""
        text = str(error).removeprefix(called) if called else str(error)
        if called and text.startswith((" contradicts", " holds", " is a", " makes", " reads", " writes")):
            text = f"it{text}"
        text = text.removeprefix(" is not valid").removeprefix(":").strip()
        reason, _, way_out = text.rpartition("; ") if isinstance(error, UnsupportedError) else ("", "", text)
        known = {
            **vars(what),
            "reason": reason or way_out,
            "way_out": way_out if reason else "",
            "invalid": isinstance(error, ModelError),
        }
        self.issues.append(Issue(**known))

    def catch(self, fn: Callable[[], object], what: Issue, called: str) -> bool:
        """Calls a function; whether it refused, which is noted."""
        try:
            fn()
        except (ModelError, UnsupportedError) as error:
            self.add(error, what, called)
            return True
        return False
