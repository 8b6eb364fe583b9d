#!/usr/bin/env bash
# ctest 4.4.4, `--output-junit`: a test whose program was not built, and one whose fixture failed, are skipped in the report, which counts
# no failure for them; ctest itself says "Not Run", lists both under "The following tests FAILED" and exits 8. A grader that reads the
# report finds a patch that does not compile without a failed test.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q cmake==4.4.4
cat >CMakeLists.txt <<'CMAKE'
cmake_minimum_required(VERSION 3.20)
project(finding NONE)
enable_testing()
add_test(NAME passes COMMAND true)
add_test(NAME unbuilt COMMAND ${CMAKE_CURRENT_BINARY_DIR}/unbuilt)
add_test(NAME database COMMAND false)
set_tests_properties(database PROPERTIES FIXTURES_SETUP database)
add_test(NAME query COMMAND true)
set_tests_properties(query PROPERTIES FIXTURES_REQUIRED database)
CMAKE
venv/bin/cmake -S . -B build >/dev/null
(cd build && { ../venv/bin/ctest --output-junit report.xml 2>&1 && echo 0 || echo $?; } >../log)
found=$(sed -n '/tests FAILED/,/query/p' log | tr -d '\t' | tr -s ' ' && tail -n 1 log && venv/bin/python -c '
import xml.etree.ElementTree as ET

suite = ET.parse("build/report.xml").getroot()
print("failures", suite.get("failures"), "skipped", suite.get("skipped"))
for case in suite:
    print(case.get("name"), [(child.tag, child.get("message")) for child in case if child.tag in ("failure", "skipped")])')
wanted="The following tests FAILED:
 2 - unbuilt (Not Run)
 3 - database (Failed)
 4 - query (Not Run)
8
failures 1 skipped 2
passes []
unbuilt [('skipped', 'Unable to find executable')]
database [('failure', 'Failed')]
query [('skipped', 'Fixture dependency failed')]"
echo "ctest 4.4.4:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
