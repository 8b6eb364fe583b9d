"""Unified diffs: what diff and git write applies, what models write wrongly is told, nothing breaks the parser."""

from __future__ import annotations

import difflib
import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos.tools.sandboxed import diffs
from atropos.tools.sandboxed.diffs import PatchError

line = st.sampled_from(["a", "b", "", " ", "-- x", "++ y", "@@ z", "\\ w", "    if x:", "é", "a b"])
texts = st.lists(line, max_size=14)


def join(lines, end=True):
    return "\n".join(lines) + ("\n" if end and lines else "")


@settings(max_examples=150)
@given(texts, texts, st.booleans(), st.booleans(), st.integers(0, 3))
def test_applied_gives_new_text(old, new, old_end, new_end, context):
    before, after = join(old, old_end), join(new, new_end)
    made = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "a/f", "b/f", n=context
    )
    text = "".join(one if one.endswith("\n") else f"{one}\n\\ No newline at end of file\n" for one in made)
    if not text:
        return
    if any(one.startswith(("--- ", "+++ ")) for one in text.splitlines()[2:]):
        return  # lines that look like a file's header can't be told from one
    assert diffs.apply(before, diffs.parse(text)[0]) == after


@pytest.mark.parametrize(
    ("written", "name"),
    [(r"n\303\251 \"x\"\t", 'né "x"\t'), (r"né\t", "né\t"), (r"caf\351", None), ("caf\\", None), (r"\ud800", None)],
)
def test_a_quoted_name_is_utf8(written, name):
    text = f'--- /dev/null\n+++ "b/{written}"\n@@ -0,0 +1 @@\n+x\n'
    if name is not None:
        assert diffs.parse(text)[0].path == name
        return
    with pytest.raises(PatchError, match="is not UTF-8") as caught:
        diffs.parse(text)
    str(caught.value).encode()


def test_gits_own_diff(tmp_path):
    def git(*arguments):
        return subprocess.run(["git", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    for name, text in {"a.txt": "1\n2\n3\n" * 10, "gone": "x\n", "old": "same\n" * 30, "crlf": "a\r\nb\r\n"}.items():
        (tmp_path / name).write_text(text, newline="")
    (tmp_path / "né").write_text("1\n")
    git("add", ".")
    git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m")
    (tmp_path / "né").write_text("2\n")
    (tmp_path / "a.txt").write_text("1\n2\n3\n" * 5 + "new\n" + "1\n2\n3\n" * 5)
    (tmp_path / "gone").unlink()
    (tmp_path / "old").rename(tmp_path / "new name")
    (tmp_path / "made").write_text("made")
    (tmp_path / "empty").write_text("")
    (tmp_path / "crlf").write_text("a\r\nB\r\n", newline="")
    git("add", "-A")
    text = git("diff", "--cached", "-M")
    changes = {(one.old_path, one.new_path): one for one in diffs.parse(text)}
    assert set(changes) >= {("a.txt", "a.txt"), ("gone", None), (None, "made"), ("crlf", "crlf"), ("né", "né")}
    assert {("old", "new name"), (None, "empty")} <= set(changes)
    assert diffs.apply("1\n2\n3\n" * 10, changes["a.txt", "a.txt"]) == (tmp_path / "a.txt").read_text()
    assert diffs.apply("", changes[None, "made"]) == "made"
    assert diffs.apply("x\n", changes["gone", None]) == ""
    assert diffs.apply("a\r\nb\r\n", changes["crlf", "crlf"]) == "a\r\nB\r\n"


@pytest.mark.parametrize(
    ("header", "change"),
    [
        ("a/x b/x\nold mode 100644\nnew mode 100755\n", ("x", "x", 0o755, False)),
        ("a/x b/y\nold mode 100644\nnew mode 100755\nrename from x\nrename to y\n", ("x", "y", 0o755, True)),
        (r'"a/n\303\251" b/y' + "\n" + r'rename from "n\303\251"' + "\nrename to y\n", ("né", "y", None, True)),
        (r'"a/n\303\251" "b/n\303\251"' + "\nnew file mode 100755\n", (None, "né", 0o755, False)),
        ("a/x b/x\ndeleted file mode 100644\n", ("x", None, None, False)),
    ],
)
def test_change_may_have_no_lines(header, change):
    for more in ("", "diff --git a/f b/f\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n"):
        one, *_ = diffs.parse(f"diff --git {header}{more}")
        assert (one.old_path, one.new_path, one.mode, one.rename) == change


def test_wrong_numbers_forgiven():
    text = join(str(i) for i in range(100))
    change = diffs.parse("--- f\n+++ f\n@@ -7,99 +7,1 @@\n 50\n-51\n+x\n@@ @@\n 80\n+y\n")[0]
    assert diffs.apply(text, change) == text.replace("\n51\n", "\nx\n").replace("\n80\n", "\n80\ny\n")
    wrong = diffs.parse("--- f\n+++ f\n@@ -1 +1 @@\n 50\n-5l\n+x\n")[0]
    with pytest.raises(PatchError, match="the hunk does not apply to f"):
        diffs.apply(text, wrong)


def test_byte_order_mark_is_no_text():
    change = diffs.parse("--- f\n+++ f\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n")[0]
    assert diffs.apply("\ufeffa\nc\n", change) == "\ufeffb\nc\n"
    removing = diffs.parse("--- f\n+++ f\n@@ -1,2 +1,2 @@\n-\ufeffa\n+a\n c\n")[0]
    assert diffs.apply("\ufeffa\nc\n", removing) == "a\nc\n"
    deleting = diffs.parse("--- f\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n")[0]
    assert diffs.apply("\ufeffa\n", deleting) == ""


def test_nearest_hunk_is_taken():
    text = "a\nb\n" * 20
    change = diffs.parse("--- f\n+++ f\n@@ -21,2 +21,2 @@\n a\n-b\n+B\n")[0]
    assert diffs.apply(text, change).split("\n").index("B") == 21


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "no unified diff"),
        ("@@ -1 +1 @@\n-a\n+b\n", "without '--- a/FILE'"),
        ("--- a\n+++ b\n", "no hunk"),
        ("--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n", "both sides"),
        ("diff --git a/x b/x\nGIT binary patch\n", "binary"),
        ("--- f\n+++ f\n@@ -1 +1 @@\nrubbish\n", "empty"),
    ],
)
def test_what_is_no_diff_is_told(text, wanted):
    with pytest.raises(PatchError, match=wanted):
        diffs.apply("", diffs.parse(text)[0])


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(["--- a/f", "+++ b/f", "@@ -1 +1 @@", "@@", "+x", "-a", " b", "\\ No newline", "diff --git a/f b/f",
                         "rename from x", "rename to y", "new file mode 100644", '+++ "q"', "--- ", "+++ ", "\x00", ""])
        | st.text(max_size=5),
        max_size=15,
    )
)  # fmt: skip
def test_no_text_breaks_it(lines):
    try:
        for change in diffs.parse("\n".join(lines)):
            diffs.apply("a\nb\n", change)
    except PatchError as error:
        assert str(error)


def test_near_misses_differ_how():
    lines = ["def f(x):", "    return x + 1", "", "def g(y):", "    return y"]
    assert "white space only" in diffs.near_miss(lines, ["def f(x):", "  return x + 1"])
    assert "line 2" in diffs.near_miss(lines, ["    return x + 2"])
    assert "nothing similar" in diffs.near_miss(lines, ["completely different text here"])
    assert diffs.near_miss([], ["x"]) == "the file is empty"


def test_near_misses_are_bounded():
    def seconds(count):
        started = time.process_time()
        lines = [f"value_{i} = compute({i}, {i * 7})" for i in range(count)]
        assert diffs.near_miss(lines, ["value_77 = compute(77, 540)"])
        assert diffs.near_miss(["x" * count], ["y" * count])
        return time.process_time() - started

    assert seconds(200_000) < max(seconds(25_000), 0.2) * 30


@pytest.mark.slow("large input")
@pytest.mark.parametrize("kind", ["missing", "blank", "near", "hunks", "number"])
def test_equal_lines_cost_no_time(kind):
    started = time.process_time()
    if kind == "number":
        with pytest.raises(PatchError):
            diffs.apply("a\n", diffs.parse(f"--- a/f\n+++ b/f\n@@ -{'9' * 5000} +1 @@\n-b\n+c\n")[0])
    elif kind == "hunks":
        text = "--- a/f\n+++ b/f\n" + "@@ -1 +1 @@\n-a\n+b\n" * 50_000
        with pytest.raises(PatchError, match="hunks"):
            diffs.apply("a\n" * 100_000, diffs.parse(text)[0])
    elif kind == "near":  # lines of the same letters in another order: alike at a glance, compared in vain
        lines = ["".join("ab"[(index * step) % 7 % 2] for index in range(400)) for step in range(1, 500)]
        diffs.near_miss(lines, ["".join("ba"[index * index % 5 % 2] for index in range(400))])
    else:
        file, wanted = ["a"] * 100_000, ["a" if kind == "missing" else " a"] * 50_000 + ["b"]
        assert diffs.near_miss(file, wanted)
        hunk = diffs.Hunk(None, [(" ", one) for one in wanted])
        with pytest.raises(PatchError):
            diffs.apply("a\n" * 100_000, diffs.FileChange("f", "f", [hunk]))
    assert time.process_time() - started < 20
