#!/bin/bash
set -e
cat > /workspace/merge.py <<'PY'
import csv
import sys
from collections import Counter

total = Counter()
for name in sys.argv[1:]:
    with open(name, newline="") as file:
        for row in csv.DictReader(file):
            total[row["sku"].strip().upper()] += int(row["pieces"])
print("sku,pieces")
for sku in sorted(total):
    if total[sku]:
        print(f"{sku},{total[sku]}")
PY
cd /workspace
python3 merge.py north.csv south.csv
