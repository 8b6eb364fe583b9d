#!/usr/bin/env bash
# jest-junit 17.0.0, as it is by default, with jest 30.5.2: a test file that can't be loaded is not in the report, whose `errors` is 0, and
# a `test.todo` is a testcase that passed, though `tests` does not count it. `$$` in a title is written as `$`, and `$&` as `{title}`: a
# grader that asks for a test by jest's name for it does not find it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{}' >package.json
npm install --silent jest@30.5.2 jest-junit@17.0.0
echo 'require("./removed"); test("reads", () => {});' >read.test.js
cat >price.test.js <<'JAVASCRIPT'
test("adds", () => {});
test.todo("rounds");
test("writes $$5", () => {});
test("matches $&", () => {});
JAVASCRIPT
status=0
node_modules/.bin/jest --reporters=jest-junit >/dev/null 2>&1 || status=$?
found=$(echo "status $status" && { node_modules/.bin/jest --json 2>/dev/null || true; } | node -e '
const report = JSON.parse(fs.readFileSync(0));
console.log("jest: files that failed", report.numFailedTestSuites, "todo", report.numTodoTests);' &&
  grep -oE '<testsuites.*errors="[0-9]+"|<testcase.* name="[^"]*"|<skipped|<failure|<error' junit.xml)
wanted='status 1
jest: files that failed 1 todo 1
<testsuites name="jest tests" tests="3" failures="0" errors="0"
<testcase classname=" adds" name=" adds"
<testcase classname=" rounds" name=" rounds"
<testcase classname=" writes $5" name=" writes $5"
<testcase classname=" matches {title}" name=" matches {title}"'
echo "jest-junit 17.0.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
