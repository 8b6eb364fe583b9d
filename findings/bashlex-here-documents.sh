#!/usr/bin/env bash
# bashlex 0.18, by which agents' tools take a model's commands apart: a here-document whose end is quoted (<<'EOF'), as
# models write files, is an error, since the quotes are looked for at its end. One without quotes is read, but the
# command's position ends before the document: who cuts by positions loses it, and the next command's text is whole.
# `$((1 + 1))`, `[[ ]]`, `case`, an array and `time` are errors as well; bash runs each of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q bashlex==0.18
cat >parse.py <<'PYTHON'
import subprocess

import bashlex

SCRIPTS = (
    "cat <<'EOF'\na\nEOF\n",
    "cat <<EOF\na\nEOF\necho b\n",
    "echo $((1 + 1))",
    "[[ -d / ]] && echo a",
    "case a in a) echo a ;; esac",
    "names=(a b); echo ${names[1]}",
    "time true",
)
for script in SCRIPTS:
    status = subprocess.run(["bash", "-c", script], capture_output=True).returncode
    try:
        read = [script[slice(*command.pos)] for command in bashlex.parse(script)]
    except Exception as error:
        read = type(error).__name__
    print(f"{script!r}: bash {status}, bashlex {read}")
PYTHON
found=$(venv/bin/python parse.py)
wanted=$(
  cat <<'TEXT'
"cat <<'EOF'\na\nEOF\n": bash 0, bashlex ParsingError
'cat <<EOF\na\nEOF\necho b\n': bash 0, bashlex ['cat <<EOF', 'echo b']
'echo $((1 + 1))': bash 0, bashlex NotImplementedError
'[[ -d / ]] && echo a': bash 0, bashlex ParsingError
'case a in a) echo a ;; esac': bash 0, bashlex NotImplementedError
'names=(a b); echo ${names[1]}': bash 0, bashlex ParsingError
'time true': bash 0, bashlex NotImplementedError
TEXT
)
echo "bashlex 0.18:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
