#!/usr/bin/env bash
# Meson 1.12.1's JUnit report has of a TAP program only the lines that it printed: one that ends before its plan, bails
# out, or prints all its lines and exits 1 is an error on the terminal and for the exit status, and in the report not
# one test has failed. A test that should fail, and does, is fine on the terminal and a failure in the report. A
# passed TODO, which TAP calls a bonus, fails its program.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q meson==1.12.1 ninja==1.13.2
cat >meson.build <<'MESON'
project('demo')
sh = find_program('sh')
foreach name, script : {
    'short': 'echo 1..3; echo ok 1 a',
    'bails': 'echo 1..2; echo ok 1 a; echo "Bail out! no database"',
    'exits': 'echo 1..1; echo ok 1 a; exit 1',
    'bonus': 'echo 1..1; echo "ok 1 a # TODO later"',
  }
  test(name, sh, args: ['-c', script], protocol: 'tap')
endforeach
test('should', sh, args: ['-c', 'echo 1..1; echo not ok 1 a'], protocol: 'tap', should_fail: true)
MESON
export PATH="$PWD/venv/bin:$PATH"
meson setup build >/dev/null
for name in short bails exits bonus should; do
  status=0
  meson test -C build "$name" >/dev/null 2>&1 || status=$?
  venv/bin/python - "$name" "$status" <<'PYTHON'
import sys
import xml.etree.ElementTree as ET

tests = ET.parse("build/meson-logs/testlog.junit.xml").iter("testcase")
told = [[child.tag for child in each if child.tag != "system-out"] or "passed" for each in tests]
print(f"{sys.argv[1]}: exit {sys.argv[2]}, report {told}")
PYTHON
done >found
wanted="short: exit 1, report ['passed']
bails: exit 1, report ['passed']
exits: exit 1, report ['passed']
bonus: exit 1, report [['failure']]
should: exit 0, report [['failure']]"
found=$(cat found)
echo "meson 1.12.1:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
