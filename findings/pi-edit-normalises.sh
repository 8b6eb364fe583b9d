#!/usr/bin/env bash
# pi-coding-agent 0.73.1: where an edit's old text differs from the file by a blank at a line's end, or a quote's form, `edit` writes the
# whole file in a "normalized" form: Markdown's hard breaks go, m² is m2, ½ is 1⁄2 and curly quotes are straight in lines that
# the edit does not name. The diff that it shows is against the normalised file, so neither the model nor who reads along sees it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' >package.json
npm install --silent --ignore-scripts --omit=optional @mariozechner/pi-coding-agent@0.73.1
cat >edit.js <<'JAVASCRIPT'
import { readFileSync, writeFileSync } from "node:fs";
import { createEditTool } from "@mariozechner/pi-coding-agent";

writeFileSync("area.py", 'UNIT = "m²"  \nHALF = "½"\nprint(1) \nprint(UNIT)\n');
const edit = { oldText: "print(1)\nprint(UNIT)", newText: "print(2)\nprint(UNIT)" };
const answer = await createEditTool(process.cwd()).execute("call", { path: "area.py", edits: [edit] });
console.log(answer.details.diff);
console.log(JSON.stringify(readFileSync("area.py", "utf8")));
JAVASCRIPT
found=$(node edit.js)
wanted=' 1 UNIT = "m2"
 2 HALF = "1⁄2"
-3 print(1)
+3 print(2)
 4 print(UNIT)
"UNIT = \"m2\"\nHALF = \"1⁄2\"\nprint(2)\nprint(UNIT)\n"'
echo "pi-coding-agent 0.73.1:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
