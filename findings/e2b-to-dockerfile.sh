#!/usr/bin/env bash
# e2b 2.63.0's Template.to_dockerfile leaves out who does a step: the user of COPY and RUN, and a copied file's mode. Values and names with
# blanks are not quoted, so a builder reads others. The start command becomes an ENTRYPOINT, which takes `docker run IMAGE COMMAND`'s
# command as its arguments, and the ready command is gone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q e2b==2.63.0
echo >notes.txt
cat >write.py <<'PYTHON'
from e2b import Template

print(
    Template.to_dockerfile(
        Template(file_context_path=".")
        .from_image("debian:13")
        .set_user("root")
        .copy("notes.txt", "/srv/", user="nobody", mode=0o600)
        .copy("notes.txt", "/srv/my notes.txt")
        .run_cmd("id", user="nobody")
        .set_envs({"TITLE": "two words"})
        .set_start_cmd("sleep 60", "test -e /srv")
    ).strip()
)
PYTHON
found=$(venv/bin/python write.py)
wanted=$(cat <<'WANTED'
FROM debian:13
USER root
COPY notes.txt /srv/
COPY notes.txt /srv/my notes.txt
RUN id
ENV TITLE=two words
ENTRYPOINT sleep 60
WANTED
)
echo "e2b 2.63.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
