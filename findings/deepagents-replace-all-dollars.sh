#!/usr/bin/env bash
# deepagents 1.14.1 (npm): the `edit` of BaseSandbox, which sandboxes of all providers have from it, reads `$` in the new text as JavaScript's
# `replaceAll` does when `replaceAll` is true: a shell's `$$` is written as `$`, `$&` as the old text and `$'` as the rest of the file, and
# the number of occurrences comes out of the lengths. An edit of one place writes the same text as it is. Neither is an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' >package.json
npm install --silent deepagents@1.14.1
cat >edit.js <<'JAVASCRIPT'
import { readFile, writeFile } from "node:fs/promises";
import { BaseSandbox } from "deepagents";

class Folder extends BaseSandbox {
  async downloadFiles(paths) {
    return Promise.all(paths.map(async (path) => ({ path, content: await readFile(path), error: null })));
  }

  async uploadFiles(files) {
    return Promise.all(files.map(async ([path, content]) => (await writeFile(path, content), { path, error: null })));
  }
}

for (const text of ["run.$$", "sed 's/a/$&/'", "$'\\n'"]) {
  for (const all of [false, true]) {
    await writeFile("run.sh", "log=FILE; done\n");
    const { occurrences } = await new Folder().edit("run.sh", "FILE", text, all);
    console.log(all ? "all:" : "one:", JSON.stringify(await readFile("run.sh", "utf8")), occurrences);
  }
}
JAVASCRIPT
found=$(node edit.js)
wanted=$(cat <<'WANTED'
one: "log=run.$$; done\n" 1
all: "log=run.$; done\n" 0.5
one: "log=sed 's/a/$&/'; done\n" 1
all: "log=sed 's/a/FILE/'; done\n" 1.2222222222222223
one: "log=$'\\n'; done\n" 1
all: "log=; done\n\\n'; done\n" 6
WANTED
)
echo "deepagents 1.14.1:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
