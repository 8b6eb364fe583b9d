#!/usr/bin/env bash
# @anthropic-ai/sandbox-runtime 0.0.83 (needs bubblewrap and socat): in the sandbox a folder that may be written to has twelve names that it
# doesn't have outside, eleven of them character devices and `.claude` a folder. So `git add -A` fails, `.vscode` and
# `.gitmodules` can't be made, and `git config` fails, too. $TMPDIR names a folder that isn't there, so `mktemp` fails. A command
# in one word, as in its README, is looked for as a program's name (127); `-c` runs it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --no-fund --no-audit @anthropic-ai/sandbox-runtime@0.0.83 @vscode/ripgrep@1.18.0 >/dev/null
PATH=$(dirname "$(find "$folder/node_modules" -name rg -type f | head -1)"):$PATH
mkdir work && cd work
git init -q
echo '{"network": {"allowedDomains": [], "deniedDomains": []}, "filesystem": {"denyRead": [], "allowWrite": ["."], "denyWrite": []}}' >../settings.json
sandboxed() { "$folder/node_modules/.bin/srt" --settings ../settings.json "$@" 2>&1; }
found=$(
	echo "outside: $(ls -A | xargs)"
	echo "inside: $(sandboxed -c 'ls -A | xargs; stat -c %F .[a-z]* | grep -c character' | xargs)"
	sandboxed -c 'git add -A >/dev/null 2>&1; echo "git add: $?"; git config user.name x >/dev/null 2>&1; echo "git config: $?"; mkdir .vscode 2>/dev/null; echo "mkdir .vscode: $?"; mktemp >/dev/null 2>&1; echo "mktemp: $?"'
	sandboxed 'echo one word' >/dev/null || echo "one word: $?"
)
wanted="outside: .git
inside: .bash_profile .bashrc .claude .git .gitconfig .gitmodules .idea .mcp.json .profile .ripgreprc .vscode .zprofile .zshrc 11
git add: 128
git config: 4
mkdir .vscode: 1
mktemp: 1
one word: 127"
echo "@anthropic-ai/sandbox-runtime 0.0.83:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
