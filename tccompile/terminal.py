"""What is printed: names come from models and plans, which may be anybody's, and a terminal acts on some signs."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import click


def plain(text: str) -> str:
    """The text on one line, without signs that are not seen: control characters, marks of direction, halves of characters."""
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(text: str, err: bool = False) -> None:
    """Print lines of text on stdout or stderr, in signs that are seen and that it can take."""
    shown = "\n".join(map(plain, text.split("\n")))
    encoding = getattr(sys.stderr if err else sys.stdout, "encoding", None) or "utf-8"
    click.echo(shown.encode(encoding, "backslashreplace").decode(encoding), err=err)


def json_text(data: Any) -> str:
    """The data as JSON in one line, signs that are not seen as escapes."""
    text = json.dumps(data, ensure_ascii=False)
    return text if text.isprintable() else "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)


def member_name(name: str) -> str:
    """What an array is called in an archive: its name, with %XX, as in a URL, for what no file below a folder can be called.

    That is a / in front, a folder .. or ., a backslash, the colon of a drive, signs that are not seen, and what looks like %XX.
    `urllib.parse.unquote` gives the name back.
    """
    text = re.sub(r"%(?=[0-9A-Fa-f]{2})|\\|\A/", _percent, name)
    text = re.sub(r"(?<![^/])\.{1,2}(?![^/])", lambda found: "%2E" * len(found[0]), text)
    text = re.sub(r"(?<=\A[A-Za-z]):", _percent, text)
    return text if text.isprintable() else "".join(c if c.isprintable() else _hex(c) for c in text)


def _percent(found: re.Match[str]) -> str:
    return _hex(found[0])


def _hex(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))
