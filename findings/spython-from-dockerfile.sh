#!/usr/bin/env bash
# spython 0.3.14, `spython recipe Dockerfile`, with which clusters that have Apptainer take over a task's Dockerfile:
# the build doesn't export what ENV sets, so no program of a RUN sees it. A command loses its quotes: "two words" are
# two, and a CMD in words without an ENTRYPOINT is given to bash, which takes `sh` for a script. COPY's --chown is a
# file to copy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q spython==0.3.14
cat >image <<'DOCKERFILE'
FROM debian:12
ENV MODE=fast
RUN sh -c 'echo "mode: $MODE"'
COPY --chown=nobody app.py /app/
DOCKERFILE
{ cat image && echo 'ENTRYPOINT ["printf", "%s,", "two words"]'; } >Dockerfile.entrypoint
{ cat image && echo 'CMD ["sh", "-c", "echo started"]'; } >Dockerfile.cmd
for name in entrypoint cmd; do
  venv/bin/spython recipe "Dockerfile.$name" 2>/dev/null >"$name.def"
done
run() {
  sed -n "/^%$2\$/,/^%/{/^%/!p}" "$1.def" >script
  env -i PATH="$PATH" sh script 2>/dev/null || echo "exits $?"
}
found=$(sed -n '/^%files/,/^%post/{/^%/!p}' entrypoint.def
  run entrypoint post
  run entrypoint runscript && echo
  run cmd runscript)
wanted="--chown=nobody /app/
app.py /app/
mode: 
two,words,
exits 126"
echo "spython 0.3.14:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
