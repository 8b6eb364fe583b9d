#!/usr/bin/env bash
# pytest-json-report 1.5.0 beside pytest-rerunfailures 16.7: a test that passed at its third try has the outcome "rerun" and is not counted
# as passed, though its last call is; one that failed at every try is "failed". A grader that wants "passed" of each test scores a
# right patch 0. In pytest 9.2.0's own JUnit report each failed try but the last is a passed testcase: two of a test that never passed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q pytest==9.2.0 pytest-json-report==1.5.0 pytest-metadata==3.1.1 pytest-rerunfailures==16.7
cat >test_tries.py <<'PYTHON'
tries = 0

def test_third():
    global tries
    tries += 1
    assert tries == 3

def test_never():
    assert False
PYTHON
venv/bin/python -m pytest -q --reruns 2 --json-report --junitxml=junit.xml >/dev/null || true
found=$(venv/bin/python -c '
import json
import xml.etree.ElementTree as ET

report = json.load(open(".report.json"))
for test in report["tests"]:
    print(test["nodeid"], test["outcome"], "with a last call that", test["call"]["outcome"])
print(report["summary"].get("passed", 0), "counted as passed")
print(*(case.get("name") + (" failed" if len(case) else " passed") for case in ET.parse("junit.xml").iter("testcase")), sep=", ")')
wanted="test_tries.py::test_third rerun with a last call that passed
test_tries.py::test_never failed with a last call that failed
0 counted as passed
test_third passed, test_third passed, test_third passed, test_never passed, test_never passed, test_never failed"
echo "pytest-json-report 1.5.0, pytest-rerunfailures 16.7, pytest 9.2.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
