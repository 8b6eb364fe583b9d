#!/usr/bin/env bash
# pytest 9.1.0 lists a unittest test whose subTest failed as PASSED in the short summary of `-rA`; only a line of another word,
# SUBFAILED, says more, and a test with the `subtests` fixture gets FAILED. pytest-json-report 1.5.0 gives such a test the call outcome
# "passed". What reads a reward from PASSED and FAILED lines takes the failure for a success.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q pytest==9.1.0 pytest-json-report==1.5.0
cat >test_subtests.py <<'PYTHON'
import unittest

class Test(unittest.TestCase):
    def test_unittest(self):
        for n in range(3):
            with self.subTest(n=n):
                self.assertNotEqual(n, 1)

def test_fixture(subtests):
    for n in range(3):
        with subtests.test(n=n):
            assert n != 1
PYTHON
code=0
venv/bin/pytest -q -rA --json-report --json-report-file=report.json >output.txt || code=$?
found=$(sed -n 's/^\([A-Z]*\)[^ ]* test_subtests.py::\(Test::\)*\([a-z_]*\).*/\1 \3/p' output.txt | sort
  venv/bin/python -c '
import json
for test in json.load(open("report.json"))["tests"]:
    print(test["nodeid"].split("::")[-1], "call", test["call"]["outcome"])')
wanted="FAILED test_fixture
PASSED test_unittest
SUBFAILED test_fixture
SUBFAILED test_unittest
test_unittest call passed
test_fixture call failed"
echo "pytest 9.1.0, exit $code:"$'\n'"$found"
[ "$found" = "$wanted" ] && [ "$code" = 1 ] || { echo "it was: $wanted" >&2; exit 1; }
