#!/usr/bin/env bash
# python-hcl2 8.1.4, told to give values (strip_string_quotes, preserve_heredocs=False): a here-document comes without
# its last newline, and one of `<<-` with a backslash before each quote and backslash, where one of `<<` has none. HCL's
# own library 2.23.0 gives the text as it stands, newline included. A template of a Nomad job that is read so is no
# longer the JSON, or the script, that it was.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q python-hcl2==8.1.4
cat >job.hcl <<'HCL'
template {
  data = <<EOF
{"port": 80}
EOF
}
template {
  data = <<-EOF
    {"port": 80}
    {"path": "C:\\"}
    EOF
}
HCL
cat >read.py <<'PYTHON'
import hcl2

options = hcl2.SerializationOptions(strip_string_quotes=True, preserve_heredocs=False)
with open("job.hcl") as file:
    for template in hcl2.load(file, serialization_options=options)["template"]:
        print(template["data"] + "|")
PYTHON
found=$(venv/bin/python read.py)
wanted='{"port": 80}|
{\"port\": 80}
{\"path\": \"C:\\\\\"}|'
echo "python-hcl2 8.1.4:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
