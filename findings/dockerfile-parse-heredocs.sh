#!/usr/bin/env bash
# dockerfile-parse 2.0.1 takes the lines of a here-document for instructions: a Dockerfile that the image only writes to
# disk brings its FROM as the base image, and the variables of the real one are gone. A base image that is set replaces
# the line in the here-document and leaves the image's own. Of `${MODE:-slow}` it keeps the default behind the value:
# `fast:-slow}`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q dockerfile-parse==2.0.1
cat >parse.py <<'PYTHON'
from dockerfile_parse import DockerfileParser

parser = DockerfileParser(path=".")
parser.content = """FROM python:3.12
ENV MODE=fast
ENV LEVEL=${MODE:-slow}
"""
print("without:", parser.baseimage, dict(parser.envs))
parser.content += """COPY <<EOF /srv/Dockerfile
FROM alpine:3.20
ENV PORT=80
EOF
CMD ["python", "-m", "app"]
"""
print("with:", parser.baseimage, dict(parser.envs))
parser.baseimage = "python:3.13"
print([line for line in parser.lines if line.startswith("FROM")])
PYTHON
found=$(venv/bin/python parse.py)
wanted="without: python:3.12 {'MODE': 'fast', 'LEVEL': 'fast:-slow}'}
with: alpine:3.20 {'PORT': '80'}
['FROM python:3.12\\n', 'FROM python:3.13\\n']"
echo "dockerfile-parse 2.0.1:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
