#!/bin/bash
set -e
cd /workspace
cat > report.py <<'PY'
import json
import re
import sys
from collections import Counter

LINE = re.compile(r'(\S+) \S+ \S+ \[[^\]]*\] "(\S+) (\S+) (\S+)" (\d{3}) (\d+|-)(?:\s.*)?$')
requests = bad = size = 0
status, paths, failing = Counter(), Counter(), Counter()
with open(sys.argv[1], encoding="utf-8", errors="replace") as log:
    for line in log:
        line = line.rstrip("\n")
        if not line.strip():
            continue
        match = LINE.match(line)
        if not match:
            bad += 1
            continue
        requests += 1
        client, _, target, _, code, length = match.groups()
        status[code[0] + "xx"] += 1
        size += 0 if length == "-" else int(length)
        paths[target.split("?")[0]] += 1
        if code[0] == "5":
            failing[client] += 1
print(json.dumps({
    "requests": requests,
    "bad_lines": bad,
    "status": dict(status),
    "bytes": size,
    "top_paths": sorted(paths.items(), key=lambda item: (-item[1], item[0]))[:5],
    "slowest_client": min(failing, key=lambda name: (-failing[name], name)) if failing else None,
}))
PY
python3 report.py access.log
