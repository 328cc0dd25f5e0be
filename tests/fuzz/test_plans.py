"""Some changed plans of `tests.fuzz.plans`, and that it sees what is taken wrongly."""

from __future__ import annotations

from collections import Counter

import pytest

from tccompile.ir import limits
from tccompile.plan import file as plan_file
from tccompile.plan import rules
from tests.fuzz.plans import join, seeds, split, tried
from tests.tiers import thorough

COUNT = 120

ENOUGH = 900
"""Changed plans, of which each check holds back at least one that nothing else does."""


def test_some_changed_plans():
    results = [tried(number) for number in range(COUNT)]
    assert [message for _, message in results if message] == []
    counts = Counter(what for what, _ in results)
    assert counts["refused"] > COUNT / 4 and counts["run"] > COUNT / 20


def test_plans_to_begin_with_are_whole():
    for file in seeds():
        assert plan_file.to_bytes(plan_file.from_bytes(join(*split(file)))) == file


@thorough
@pytest.mark.parametrize(
    "module, check",
    [(rules, "_check_lifetimes"), (rules, "_check_edges"), (limits, "_check_written")],
    ids=["lifetimes", "edges", "written"],
)
def test_what_no_check_holds_is_seen(module, check, monkeypatch):
    """Without one of the checks, plans are accepted that give other results."""
    monkeypatch.setattr(module, check, lambda *_: None)
    assert any(message for _, message in map(tried, range(ENOUGH)))
