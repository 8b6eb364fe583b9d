#!/usr/bin/env bash
# vitest 5.1.2: a test that passed at its third try has status "passed" and two failureMessages in the JSON report; jest 30.5.2, whose
# format it is, gives none. What takes a test with messages for a failed one, as it can with jest, scores it wrong.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir vitest jest
(cd vitest && echo '{"type": "module"}' >package.json && npm install --silent vitest@5.1.2)
(cd jest && echo '{}' >package.json && npm install --silent jest@30.5.2)
echo 'import { expect, test } from "vitest"; let n = 0; test("flaky", { retry: 2 }, () => expect(++n).toBe(3))' >vitest/flaky.test.js
echo 'jest.retryTimes(2); let n = 0; test("flaky", () => expect(++n).toBe(3))' >jest/flaky.test.js
(cd vitest && node_modules/.bin/vitest run --reporter=json --outputFile=report.json >/dev/null)
(cd jest && node_modules/.bin/jest --json --outputFile=report.json >/dev/null 2>&1)
found=$(node -e 'for (const tool of ["vitest", "jest"]) {
  const test = JSON.parse(fs.readFileSync(`${tool}/report.json`)).testResults[0].assertionResults[0];
  console.log(tool, test.status, test.failureMessages.length);
}')
echo "vitest 5.1.2, jest 30.5.2:"$'\n'"$found"
[ "$found" = "vitest passed 2
jest passed 0" ]
