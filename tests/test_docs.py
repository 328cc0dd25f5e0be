"""The pages in docs: links and their anchors, how a reader gets to each page, lengths, where figures come from."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
MOST_WORDS = 2_500
GENERATED = {"docs/reference/operators.md", "docs/reference/api.md"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


@cache
def prose(page: Path) -> str:
    """A page without its blocks of code, whose # and [] are no headings and no links."""
    return re.sub(r"^(```|~~~).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links, by GitHub's rule, which the site's generator follows."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return set(found)


def links(page: Path) -> list[tuple[Path, str]]:
    """A page's links to files of the repository: the file, and the anchor in it."""
    found = [link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if not re.match(r"[a-z]+:", link)]
    return [((page.parent / path).resolve() if path else page, anchor) for path, _, anchor in found]


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.is_relative_to(ROOT)
        assert target.exists(), target
        assert not anchor or anchor in anchors(target), f"{target.name}#{anchor}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, left = set(), [README]
    while left:
        page = left.pop()
        reached.add(page)
        left += [target for target, _ in links(page) if target.suffix == ".md" and target.exists() and target not in reached]
    elsewhere = {ROOT / "docs/index.md", ROOT / "docs/package.md"}  # the site's first page, and PyPI's
    assert {page.relative_to(ROOT).as_posix() for page in set(PAGES) - reached - elsewhere} == set()


def test_pictures_are_what_their_script_draws(tmp_path: Path) -> None:
    drawn = runpy.run_path(str(ROOT / "docs/design/pictures.py"))
    drawn["page"].__globals__["HERE"] = tmp_path
    for name in ("pipeline", "plan"):
        drawn[name]()
        assert (tmp_path / f"{name}.svg").read_text() == (ROOT / f"docs/design/{name}.svg").read_text()


@pages
def test_a_page_can_be_read_at_once(page: Path) -> None:
    words = len(page.read_text(encoding="utf-8").split())
    assert words <= MOST_WORDS or page.relative_to(ROOT).as_posix() in GENERATED, f"{words} words: split it by topic"


@pytest.mark.parametrize("page", sorted((ROOT / "docs/benchmarks").glob("[a-z]*.md")), ids=lambda page: page.stem)
def test_tables_of_figures_say_where_they_come_from(page: Path) -> None:
    """Machine, date, commit and command in the line ahead of each table."""
    lines = [line for line in prose(page).splitlines() if line]
    heads = [n for n, line in enumerate(lines) if line.startswith("|") and not lines[n - 1].startswith("|")]
    assert heads
    for n in heads:
        told = re.fullmatch(r"\*.*Recorded 20\d\d-\d\d-\d\d.* in [0-9a-f]{9}.*(`python -m .*`|Commands?: .*)\.\*", lines[n - 1])
        assert told, f"{lines[n]}: ahead of it is {lines[n - 1]!r}"
