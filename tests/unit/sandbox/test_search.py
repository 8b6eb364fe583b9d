"""The runner's own search: what is done to be quick and small passes over no line."""

from __future__ import annotations

import tracemalloc

import pytest

from atropos.sandbox.programs.runner.files.search import CARRIAGE_RETURN, MAX_CHOICES, Wanted, files_of, search
from atropos.tools.sandboxed import search as search_tool


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


@pytest.mark.parametrize(
    "pattern", ["[^#]*x", "^[^#]*x", r"\s+x", r"\D*x", r"(?:\W|a)*x", r"(?:a|\n)*x", "[\\x00-z]*!"]
)
def test_what_crosses_lines_goes_by_lines(pattern):
    assert Wanted(pattern, ignore_case=False).anywhere is None


@pytest.mark.parametrize(
    ("glob", "path"),
    [
        ("src/**/foo.py", "src/a/b/foo.py"),
        ("src/**/foo.py", "src/foo.py"),
        ("**/build/x.py", "a/build/x.py"),
        ("**/build/x.py", "build/x.py"),
        ("**/src/**/foo.py", "src/a/foo.py"),
        ("**/src/**/foo.py", "a/src/foo.py"),
        ("{src/**/a,b}.py", "src/x/a.py"),
        ("*.{a,{b,c}}", "x.c"),
        ("{a,b{c,d}}.{x,y}", "bd.y"),
        ("**/*.{" + ",".join(f"e{number}" for number in range(MAX_CHOICES)) + "}", "a/b.e99"),
    ],
)
def test_globs_match(glob, path):
    assert files_of(glob).match(path)


@pytest.mark.parametrize(("glob", "path"), [("src/**/foo.py", "src/xfoo.py"), ("*.{a,{b,c}}", "x.d"), ("**/a", "b/xa")])
def test_globs_do_not_match(glob, path):
    assert not files_of(glob).match(path)


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        (r"\r$", [1]),
        ("a\r", [1]),
        (r"\x0d", [1]),
        (r"\\\r", []),
        ("a$", [1, 2]),
        (r"C:\\readme$", [3]),
        (r"a\r?$", [1, 2]),
    ],
)
def test_carriage_returns(tmp_path, pattern, lines):
    (tmp_path / "f").write_bytes(b"a\r\na\nC:\\readme" + b"\n")
    assert found_lines(tmp_path, pattern) == lines


def test_ripgrep_has_the_same_patterns():
    assert search_tool.CARRIAGE_RETURN == CARRIAGE_RETURN


def test_path_before_crlf(tmp_path):
    (tmp_path / "f").write_bytes(b"C:\\readme\r\n")
    assert found_lines(tmp_path, r"C:\\readme$") == [1]


def test_crlf_takes_little_memory(tmp_path):
    data = ("a" * 60 + "\N{GRINNING FACE}\r\n").encode() * 30_000
    (tmp_path / "f").write_bytes(data)
    tracemalloc.start()
    try:
        assert found_lines(tmp_path, "b$") == []
        assert tracemalloc.get_traced_memory()[1] < 7 * len(data)
    finally:
        tracemalloc.stop()


def found_lines(folder, pattern):
    _, answer, _ = search(str(folder), Wanted(pattern, ignore_case=False), None, 100, 0)
    return [match["line"] for match in answer["matches"]]
