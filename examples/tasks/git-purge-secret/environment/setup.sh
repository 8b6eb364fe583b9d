#!/bin/bash
set -e
export GIT_AUTHOR_NAME=Kim GIT_AUTHOR_EMAIL=kim@example.org GIT_COMMITTER_NAME=Kim GIT_COMMITTER_EMAIL=kim@example.org
git init -q -b main service
cd service
git config user.name Kim && git config user.email kim@example.org
n=0
commit() { n=$((n + 1)); export GIT_AUTHOR_DATE="2026-02-0${n}T08:00:00Z" GIT_COMMITTER_DATE="2026-02-0${n}T08:00:00Z"; git add -A; git commit -q -m "$1"; }
echo 'print("service")' > service.py; commit "Start"
printf 'PORT=8080\nAPI_KEY=sk-live-9f8e7d6c5b4a\nDEBUG=0\n' > config.env; commit "Add configuration"
echo 'def ping(): return "pong"' >> service.py; commit "Answer pings"
git tag v1
git branch feature
sed -i 's/DEBUG=0/DEBUG=1/' config.env; commit "Debug on"
git checkout -q feature
echo 'feature' > feature.txt; commit "Begin feature"
printf 'LIMIT=5\n' >> config.env; commit "Limit in configuration"
git checkout -q main
echo 'docs' > README.md; commit "Readme"
