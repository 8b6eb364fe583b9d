#!/usr/bin/env bash
# An unquoted here-document of a Dockerfile's COPY loses every backslash, not those alone that a shell's here-document would: the
# `\n` of a printf in such a script becomes `n`. Seen with BuildKit 0.25.2, by its own lexer as its COPY uses it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >main.go <<'GO'
package main

import (
	"fmt"

	"github.com/moby/buildkit/frontend/dockerfile/shell"
)

func main() {
	lex := shell.NewLex('\\') // frontend/dockerfile/dockerfile2llb/convert.go: ExpandRaw
	lex.SkipProcessQuotes = true
	text, _, err := lex.ProcessWord(`printf "a\n"; echo "\$HOME $X"; tr -d \\\\`, shell.EnvsFromSlice([]string{"X=filled"}))
	fmt.Println(text, err)
}
GO
go mod init finding >/dev/null 2>&1
go get github.com/moby/buildkit@v0.25.2 >/dev/null 2>&1
found=$(GOFLAGS=-mod=mod go run .)
wanted='printf "an"; echo "$HOME filled"; tr -d \\ <nil>'
echo "buildkit 0.25.2: $found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
