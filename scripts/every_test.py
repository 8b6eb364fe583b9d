"""Run tests marked `alone` one by one, then all others side by side; arguments go to both runs of pytest."""

from __future__ import annotations

import argparse
import os
import sys

from engines import ROOT, run

PASSED, FAILED, NONE = 0, 1, 5
"""pytest's exit codes; 5: no test was selected."""
OTHERS = (
    "-n",
    str(len(os.sched_getaffinity(0)) + 2),
    "--dist",
    "loadgroup",
    "--no-loadscope-reorder",
    "--durations=30",
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-m", dest="marks", default="")
    chosen, arguments = parser.parse_known_args(arguments)
    also = f" and ({chosen.marks})" if chosen.marks else ""
    modules = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.alone" in path.read_text()]
    alone = run(
        ["pytest", "-m", f"alone{also}", *(arguments or map(str, sorted(modules))), "-n", "0"], dict(os.environ)
    )
    if alone not in {PASSED, FAILED, NONE}:
        return alone
    others = run(["pytest", "-m", f"not alone{also}", *OTHERS, *arguments], dict(os.environ))
    if alone == FAILED:
        print("tests that run alone have failed: see above", file=sys.stderr)
    return alone if others in {PASSED, NONE} and alone != NONE else others


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
