#!/bin/bash
set -e
cd /workspace
cat > clean.py <<'PY'
import csv
import io
import re
import sys
from datetime import datetime
from decimal import Decimal

FIELDS = ["id", "name", "email", "phone", "signup", "spend"]


def date(text):
    for form, pattern in (("%Y-%m-%d", r"\d{4}-\d\d-\d\d"), ("%d.%m.%Y", r"\d\d\.\d\d\.\d{4}"), ("%m/%d/%Y", r"\d\d/\d\d/\d{4}")):
        if re.fullmatch(pattern, text):
            try:
                return datetime.strptime(text, form).strftime("%Y-%m-%d")
            except ValueError:
                return None
    return None


kept = {}
source = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", newline="")
for row in csv.DictReader(source):
    row = {name: (row[name] or "").strip() for name in FIELDS}
    row["name"] = " ".join(row["name"].split())
    row["email"] = row["email"].lower()
    user, _, host = row["email"].partition("@")
    row["signup"] = date(row["signup"])
    if not user or not host or "@" in host or row["signup"] is None:
        continue
    row["phone"] = ("+" if row["phone"].startswith("+") else "") + re.sub(r"\D", "", row["phone"])
    amount = row["spend"].replace("$", "").replace(",", "").strip() or "0"
    row["spend"] = f"{Decimal(amount):.2f}"
    old = kept.get(row["email"])
    if old is None or row["signup"] >= old["signup"]:
        kept[row["email"]] = row
target = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", newline="")
writer = csv.DictWriter(target, FIELDS, lineterminator="\n")
writer.writeheader()
writer.writerows(kept[email] for email in sorted(kept))
target.flush()
PY
python3 clean.py < customers.csv
