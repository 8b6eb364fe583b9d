"""The runner's own search: what is done to be quick passes over no line."""

from __future__ import annotations

import pytest

from atropos.sandbox.programs.runner.files.search import Wanted


@pytest.mark.parametrize(
    "pattern",
    [
        "^b",
        "a +$",
        r"\Ab",
        r"^a\s+\Z",
        r"(?<!\s)b",
        r"b(?!\s)",
        r"a\s*+$",
        r"a(?>\s+)$",
        r"a(?P<x>\s*?)$",
        r"\bb\b",
        "[^a]",
        "(?m)^b",
    ],
)
def test_no_line_is_passed_over(pattern):
    wanted = Wanted(pattern, ignore_case=False)
    lines = ["a  ", "b", "", "a"]
    assert any(map(wanted.line.search, lines))
    assert wanted.may_match("\n".join(lines))
