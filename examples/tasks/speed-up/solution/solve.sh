#!/bin/bash
set -e
cd /workspace
cat > overlaps.py <<'PY'
import sys

events = []
for line in sys.stdin:
    if line.strip():
        start, end = map(int, line.split())
        events.append((start, 1))
        events.append((end, -1))
events.sort()  # at the same moment an end (-1) comes before a start
pairs = running = most = busy = last = 0
for moment, change in events:
    if running:
        busy += moment - last
    last = moment
    if change == 1:
        pairs += running  # a starting meeting overlaps each that runs
    running += change
    most = max(most, running)
print(pairs, most, busy, sep="\n")
PY
printf '1 5\n2 3\n5 9\n' | python3 overlaps.py
