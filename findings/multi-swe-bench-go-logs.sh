#!/usr/bin/env bash
# multi-swe-bench 1.1.2 loses tests of `go test -v`: one that passed after it printed something without a newline, since Go writes
# its verdict on that line, and every skipped one, since it lists as skipped only what failed before. The package of a failed test is
# a failed test of its own. A right patch that leaves a `fmt.Print` behind has not fixed the test that it runs in.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-deps multi-swe-bench==1.1.2 dataclasses-json==0.6.7 marshmallow==3.26.1 typing-inspect mypy-extensions \
  typing-extensions packaging unidiff==0.7.5
cat >finding_test.go <<'GO'
package finding

import (
	"fmt"
	"testing"
)

func TestFails(t *testing.T)  { t.Error("wrong") }
func TestPasses(t *testing.T) {}
func TestPrints(t *testing.T) { fmt.Print("here") }
func TestSkips(t *testing.T)  { t.Skip("no network") }
GO
go mod init example/finding >/dev/null 2>&1
go test -v >go.log 2>&1 || true
found=$(grep -oE '(here)?--- .*: \w+' go.log && venv/bin/python -c '
from multi_swe_bench.harness.repos.golang.cli.cli import Cli

read = Cli.parse_log(None, open("go.log").read())
for name in ("passed", "failed", "skipped"):
    print(f"{name}:", *sorted(getattr(read, f"{name}_tests")))')
wanted="--- FAIL: TestFails
--- PASS: TestPasses
here--- PASS: TestPrints
--- SKIP: TestSkips
passed: TestPasses
failed: TestFails example/finding
skipped:"
echo "multi-swe-bench 1.1.2, $(go env GOVERSION):"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
