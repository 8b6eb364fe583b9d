#!/usr/bin/env bash
# ollama 0.17.4, whose parser for qwen3-coder makes XML of a tool call first, takes `<T=string>` in an argument for one of its tags: the
# TypeScript `class Box<T=string> {}` that a model writes to a file arrives as `class Box<T name="string"> {}`. A string that is `null`
# arrives as null. Blanks around the sign, `<`, `&` and HTML's tags do no harm.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat >main.go <<'GO'
package main

import (
	"encoding/json"
	"fmt"

	"github.com/ollama/ollama/api"
	"github.com/ollama/ollama/model/parsers"
)

const function = `{"name": "write", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}`

func main() {
	var tools []api.Tool
	if err := json.Unmarshal([]byte(`[{"type": "function", "function": `+function+`}]`), &tools); err != nil {
		panic(err)
	}
	for _, text := range []string{"class Box<T=string> {}", "class Box<T = string> {}", "if (a < b && c) {}", "<p class=x>", "null"} {
		parser := parsers.ParserForName("qwen3-coder")
		parser.Init(tools, nil, nil)
		call := "<tool_call>\n<function=write>\n<parameter=text>\n" + text + "\n</parameter>\n</function>\n</tool_call>"
		_, _, calls, err := parser.Add(call, true)
		if err != nil {
			panic(err)
		}
		fmt.Printf("%q: %#v\n", text, calls[0].Function.Arguments.ToMap()["text"])
	}
}
GO
go mod init finding >/dev/null 2>&1
go get github.com/ollama/ollama/model/parsers@v0.17.4 >/dev/null 2>&1
found=$(GOFLAGS=-mod=mod go run .)
wanted='"class Box<T=string> {}": "class Box<T name=\"string\"> {}"
"class Box<T = string> {}": "class Box<T = string> {}"
"if (a < b && c) {}": "if (a < b && c) {}"
"<p class=x>": "<p class=x>"
"null": <nil>'
echo "ollama 0.17.4:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
