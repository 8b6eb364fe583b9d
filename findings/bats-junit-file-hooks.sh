#!/usr/bin/env bash
# bats 1.13.0, JUnit report: where `setup_file` fails, none of the file's tests is in the report; the failure stands under a suite that no file
# has, setup_suite, and the file's own suite has no test. Where `teardown_file` fails, its message comes into the file's last
# test, which passed: of two tests the report counts three, and names the second as failed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{}' >package.json
npm install --silent bats@1.13.0
cat >setup.bats <<'BATS'
setup_file() { false; }
@test "one" { true; }
@test "two" { true; }
BATS
cat >teardown.bats <<'BATS'
@test "three" { true; }
@test "four" { true; }
teardown_file() { false; }
BATS
found=$(for file in setup.bats teardown.bats; do
  { node_modules/bats/bin/bats --formatter tap $file || true; } | grep -E '^(1|ok|not ok)'
  { node_modules/bats/bin/bats --formatter junit $file || true; } | grep -oE '<testsuite .* skipped|<testcase .* time|<failure'
done)
wanted='1..2
not ok 1 setup_file failed
<testsuite name="setup.bats" tests="0" failures="0" errors="0" skipped
<testsuite name="setup_suite" tests="1" failures="1" errors="0" skipped
<testcase classname="setup_suite" name="setup_file failed" time
<failure
1..2
ok 1 three
ok 2 four
not ok 3 teardown_file failed
<testsuite name="teardown.bats" tests="3" failures="1" errors="0" skipped
<testcase classname="teardown.bats" name="three" time
<testcase classname="teardown.bats" name="four" time
<failure'
echo "bats 1.13.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
