import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same

LIMITER = "class Limiter:\n    def __init__(self, rate):\n        self.rate = rate\n\n    def allow(self, used):\n        return used < self.rate\n"  # noqa: E501
APP = 'from limiter import Limiter\n\n\ndef handle(request):\n    if not Limiter(10).allow(request.count):\n        return "slow down"\n    return "ok"\n'  # noqa: E501


def git(work, *arguments):
    code, out, err = run(["git", *arguments], cwd=work / "app")
    same(code, 0, err[-300:])
    return out


def history_is_right():
    with copy_of() as work:
        log = git(work, "log", "--format=%s|%an|%ae", "main").splitlines()
        same(
            log,
            [
                "Add rate limiter|Robin|robin@example.org",
                "Say what the app does|Dana|dana@example.org",
                "Add readme|Dana|dana@example.org",
                "First version|Dana|dana@example.org",
            ],
        )
        same(git(work, "log", "-1", "--format=%aI", "main~1").strip().replace("+00:00", "Z"), "2026-01-05T10:00:00Z")
        same(git(work, "symbolic-ref", "HEAD").strip(), "refs/heads/main")
        same(git(work, "status", "--porcelain").strip(), "", "working tree")


def content_is_right():
    with copy_of() as work:
        same(git(work, "show", "main:limiter.py"), LIMITER)
        same(git(work, "show", "main:app.py"), APP)
        same(git(work, "show", "main:README.md"), "# App\n\nAnswers requests.\n")
        same(git(work, "diff", "--name-only", "main~1", "main").split(), ["app.py", "limiter.py"])


main(history_is_right, content_is_right)
