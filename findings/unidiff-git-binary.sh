#!/usr/bin/env bash
# unidiff 1.0.1 reads `git diff --binary` and writes it back without the data: what is left is a valid patch, and `git apply`
# makes an empty file of it and exits 0. A grader that drops the tests' files from an agent's patch so, and applies the rest,
# grades without the agent's binary files.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q unidiff==1.0.1
git init -q tree
cd tree
printf '\0\1\2\3' >model.bin
echo text >notes.txt
git add .
git diff --cached --binary >../agent.patch
rm model.bin notes.txt
git reset -q
../venv/bin/python -c 'import unidiff; print(unidiff.PatchSet(open("../agent.patch").read()), end="")' >../filtered.patch
git apply ../filtered.patch
found="$(stat -c %s model.bin) bytes of 4, notes.txt $(cat notes.txt)"
echo "unidiff 1.0.1: model.bin has $found, git apply exit 0"
[ "$found" = "0 bytes of 4, notes.txt text" ]
