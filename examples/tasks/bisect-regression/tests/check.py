import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, read, run, same


def git(work, *arguments):
    code, out, err = run(["git", *arguments], cwd=work / "calc")
    same(code, 0, err[-300:])
    return out


def culprit_is_named():
    with copy_of() as work:
        commits = git(work, "log", "--format=%H", "main").split()
        same(read("culprit.txt").strip(), commits[-20], "culprit.txt")
        same(git(work, "log", "-1", "--format=%s", commits[-20]).strip(), "Tidy the evaluator")


def history_grew_by_one():
    with copy_of() as work:
        subjects = git(work, "log", "--reverse", "--format=%s", "main").splitlines()
        same(len(subjects), 33, "commits")
        same(subjects[0], "Evaluate sums")
        same(subjects[24], "Say what went wrong")
        same(git(work, "status", "--porcelain").strip(), "", "working tree")
        same(git(work, "diff", "--name-only", "main~1", "main").split(), ["calc.py"])


def expressions_evaluate():
    rng = random.Random()
    with copy_of() as work:
        git(work, "checkout", "-q", "-f", "main")

        def calc(text):
            return run([sys.executable, "calc.py", text], cwd=work / "calc")[:2]

        for _ in range(6):
            a, b, c = (rng.randrange(1, 50) for _ in range(3))
            same(calc(f"- {a} + {b}"), (0, f"{b - a}\n"))
            same(calc(f"{a} + {b} * {c} - 1"), (0, f"{a + b * c - 1}\n"))
            same(calc(f"- {a} * {b} % 7"), (0, f"{-a * b % 7}\n"))
        same(calc("2 ^ 5"), (0, "32\n"))
        same(calc("nonsense"), (1, "calc: cannot read the expression\n"))


main(culprit_is_named, history_grew_by_one, expressions_evaluate)
