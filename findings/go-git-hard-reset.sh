#!/usr/bin/env bash
# go-git 5.19.3: `Reset` with `HardReset`, by its own words for changes of tracked files, deletes the untracked and the ignored files, too,
# which git leaves. A sandbox that is set back so between two tries loses its node_modules, its build and what the agent noted down.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >main.go <<'GO'
package main

import "github.com/go-git/go-git/v5"

func main() {
	repository, err := git.PlainOpen("go-git")
	if err != nil {
		panic(err)
	}
	tree, err := repository.Worktree()
	if err != nil {
		panic(err)
	}
	if err := tree.Reset(&git.ResetOptions{Mode: git.HardReset}); err != nil {
		panic(err)
	}
}
GO
(go mod init finding && go get github.com/go-git/go-git/v5@v5.19.3 && go build -o reset .) >go.log 2>&1
git init -q git
cd git
echo build/ >.gitignore
echo one >tracked
git add .
git -c user.name=a -c user.email=a@example.org commit -qm one
mkdir build
touch build/object notes
echo two >tracked
cd ..
cp -a git go-git
./reset
git -C git reset -q --hard
found=$(for tree in git go-git; do (cd $tree && echo $tree: $(cat tracked) $(find . -path ./.git -prune -o -type f -print | sort)); done)
wanted="git: one ./.gitignore ./build/object ./notes ./tracked
go-git: one ./.gitignore ./tracked"
echo "go-git 5.19.3, $(git --version):"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
