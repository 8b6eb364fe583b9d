#!/bin/bash
set -e
export GIT_AUTHOR_NAME=Dana GIT_AUTHOR_EMAIL=dana@example.org GIT_COMMITTER_NAME=Dana GIT_COMMITTER_EMAIL=dana@example.org
export GIT_AUTHOR_DATE="2026-01-05T10:00:00Z" GIT_COMMITTER_DATE="2026-01-05T10:00:00Z"
git init -q -b main app
cd app
git config user.name Dana && git config user.email dana@example.org
printf 'def handle(request):\n    return "ok"\n' > app.py && git add . && git commit -q -m "First version"
printf '# App\n' > README.md && git add . && git commit -q -m "Add readme"
printf 'class Limiter:\n    def __init__(self, rate):\n        self.rate = rate\n\n    def allow(self, used):\n        return used < self.rate\n' > limiter.py
printf 'from limiter import Limiter\n\n\ndef handle(request):\n    if not Limiter(10).allow(request.count):\n        return "slow down"\n    return "ok"\n' > app.py
git add . && GIT_AUTHOR_NAME=Robin GIT_AUTHOR_EMAIL=robin@example.org git commit -q -m "Add rate limiter"
git reset -q --hard HEAD~1
printf '# App\n\nAnswers requests.\n' > README.md && git add . && git commit -q -m "Say what the app does"
