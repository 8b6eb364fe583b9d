#!/bin/bash
set -e
cd /workspace/service
export FILTER_BRANCH_SQUELCH_WARNING=1
git filter-branch -f --tree-filter 'if [ -f config.env ]; then sed -i "s/^API_KEY=.*/API_KEY=REMOVED/" config.env; fi' \
  --tag-name-filter cat -- --all
git for-each-ref --format='delete %(refname)' refs/original | git update-ref --stdin
git reflog expire --expire=now --all
git gc -q --prune=now
git log --all --oneline
