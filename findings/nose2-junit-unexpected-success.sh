#!/usr/bin/env bash
# nose2 0.16.0, which runs unittest's tests: one that is marked as an expected failure and passes is no failure; nose2
# exits 0 and its JUnit report has the test as skipped, where unittest fails the same file. A name in the report is cut
# at its last dot: a failed subtest of the file `b.py` is the test `py]`, and a class whose setUpClass failed is the
# test `Database)`, without the tests that it has.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q nose2==0.16.0
cat >test_fixed.py <<'PYTHON'
import unittest

class Fixed(unittest.TestCase):
    @unittest.expectedFailure
    def test_known_bug(self):
        pass
PYTHON
cat >test_names.py <<'PYTHON'
import unittest

class Files(unittest.TestCase):
    def test_each(self):
        for name in "a.py", "b.py":
            with self.subTest(name):
                self.assertEqual(name, "a.py")

class Database(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        raise OSError("no database")

    def test_query(self):
        pass
PYTHON
cat >report.py <<'PYTHON'
import xml.etree.ElementTree as ET

for case in ET.parse("nose2-junit.xml").getroot():
    children = [child.tag for child in case if child.tag != "system-out"]
    print(f"class {case.get('classname')!r} name {case.get('name')!r}: {children}")
PYTHON
nose2() {
  local status=0
  venv/bin/nose2 --plugin nose2.plugins.junitxml --junit-xml "$1" 2>/dev/null || status=$?
  echo "nose2 exits $status"
}
found=$(venv/bin/python -m unittest test_fixed 2>/dev/null || echo "unittest exits $?"
  nose2 test_fixed
  venv/bin/python report.py
  nose2 test_names
  venv/bin/python report.py)
wanted="unittest exits 1
nose2 exits 0
class 'test_fixed.Fixed' name 'test_known_bug': ['skipped']
nose2 exits 1
class 'setUpClass (test_names' name 'Database)': ['error']
class 'test_names.Files.test_each [b' name 'py]': ['failure']"
echo "nose2 0.16.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
