#!/usr/bin/env bash
# python-hcl2 8.1.4 keeps the quotes: the driver of a Nomad job reads as `"docker"`, eight characters, and the job's name as `"web"`.
# Numbers and booleans come as Python's. What compares or passes on the texts of a job file finds none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q python-hcl2==8.1.4
cat >job.nomad <<'HCL'
job "web" {
  task "main" {
    driver = "docker"
    count  = 2
  }
}
HCL
found=$(venv/bin/python -c '
import hcl2

with open("job.nomad") as file:
    ((name, job),) = ((key, value) for key, value in hcl2.load(file)["job"][0].items() if key[:2] != "__")
print(name, job["task"][0]["\"main\""]["driver"], job["task"][0]["\"main\""]["count"])')
echo "python-hcl2 8.1.4: $found"
[ "$found" = '"web" "docker" 2' ]
