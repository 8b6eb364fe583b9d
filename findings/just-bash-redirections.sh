#!/usr/bin/env bash
# just-bash 3.4.2, a bash in JavaScript for agents: a redirection into a folder that isn't there makes the folder and exits 0, and
# `<<` in arithmetic counts in 32 bits. A script with a missing `mkdir`, or a hash of 64 bits, works there otherwise than in bash.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' >package.json
npm install --silent just-bash@3.4.2
cat >run.js <<'JAVASCRIPT'
import { Bash } from "just-bash";

for (const command of process.argv.slice(2)) {
  const bash = new Bash();
  process.stdout.write((await bash.exec(command)).stdout);
}
JAVASCRIPT
commands=('echo text 2>/dev/null >missing/file; echo $?' 'echo $((1 << 40))')
found=$(node run.js "${commands[@]}" | tr '\n' ' ')
bash=$(for command in "${commands[@]}"; do bash -c "$command" 2>/dev/null; done | tr '\n' ' ')
echo "just-bash 3.4.2: $found; bash: $bash"
[ "$found" = "0 256 " ] && [ "$bash" = "1 1099511627776 " ]
