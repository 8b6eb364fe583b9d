#!/usr/bin/env bash
# swesmith 0.0.9 knows a jest test by its own title, without the `describe` around it: a failed "empty list" is PASSED where another
# group's "empty list" comes later. From vitest 3.2.4's verbose report it takes no failed test at all (vitest's mark is ×, not ✗),
# and the time as part of a passed one's name, so that the name is another in the next run.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q swesmith==0.0.9 swebench==4.1.0 ghapi==1.1.1
mkdir jest vitest
(cd jest && echo '{}' >package.json && npm install --silent jest@30.5.2)
(cd vitest && echo '{"type": "module"}' >package.json && npm install --silent vitest@3.2.4)
cat >jest/list.test.js <<'JAVASCRIPT'
describe("parse", () => test("empty list", () => expect(1).toBe(2)));
describe("print", () => test("empty list", () => expect(1).toBe(1)));
JAVASCRIPT
(echo 'import { describe, expect, test } from "vitest";' && cat jest/list.test.js) >vitest/list.test.js
(cd jest && node_modules/.bin/jest --verbose >../jest.log 2>&1) || true
(cd vitest && node_modules/.bin/vitest run --no-color --reporter verbose >../vitest.log 2>&1) || true
found=$(venv/bin/python -c '
from swesmith.profiles.javascript import parse_log_jest, parse_log_vitest

print("jest:", parse_log_jest(open("jest.log").read()))
print("vitest:", parse_log_vitest(open("vitest.log").read()))' | sed 's/ [0-9]*ms/ 0ms/')
wanted="jest: {'empty list': 'PASSED'}
vitest: {'list.test.js > print > empty list 0ms': 'PASSED', 'list.test.js:2:60': 'FAILED'}"
echo "swesmith 0.0.9:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
