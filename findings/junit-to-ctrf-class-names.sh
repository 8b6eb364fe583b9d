#!/usr/bin/env bash
# junit-to-ctrf 0.0.14 leaves out a testcase's `classname`, which is where pytest's report has the file and the class:
# tests of one name have one name, and a grader cannot say which of them failed. A `time` of a thousand seconds and
# more, which Surefire up to 3.1.0 writes as 1,234.5, is one second.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{}' >package.json
npm install --silent --no-audit junit-to-ctrf@0.0.14
# as `pytest --junitxml` 9.2.0 writes it, but for dates
cat >pytest.xml <<'XML'
<testsuites name="pytest tests"><testsuite name="pytest" errors="0" failures="1" skipped="0" tests="2" time="0.050">
<testcase classname="tests.test_list.TestEmpty" name="test_length" time="0.001" />
<testcase classname="tests.test_text.TestEmpty" name="test_length" time="0.001">
<failure message="assert 0 == 1">...</failure></testcase>
</testsuite></testsuites>
XML
cat >surefire.xml <<'XML'
<testsuite name="slow.SlowTest" tests="1" time="1,234.5">
<testcase name="all" classname="slow.SlowTest" time="1,234.5"/>
</testsuite>
XML
for report in pytest surefire; do
  node_modules/.bin/junit-to-ctrf "$report.xml" -o "$report.json" >/dev/null
done
found=$(node -e 'for (const report of ["pytest", "surefire"]) {
  for (const test of JSON.parse(fs.readFileSync(`${report}.json`)).results.tests) {
    delete test.trace;
    console.log(JSON.stringify(test));
  }
}')
wanted='{"name":"pytest: test_length","status":"passed","duration":1,"suite":["pytest"]}
{"name":"pytest: test_length","status":"failed","duration":1,"message":"assert 0 == 1","suite":["pytest"]}
{"name":"slow.SlowTest: all","status":"passed","duration":1000,"suite":["slow.SlowTest"]}'
echo "junit-to-ctrf 0.0.14:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
