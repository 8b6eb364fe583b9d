"""Compares the totals with those of the orders that the service has, which only it and its auditor know whole."""

import collections
import json
import urllib.request
from pathlib import Path

AUDITOR = "4f1d0c52e6a94b7f"


def ask(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
        return json.load(answer)


expected = collections.Counter()
rates = ask("http://rates/rates.json")
for order in ask("http://orders:8000/audit", Authorization=AUDITOR):
    expected[order["customer"]] += int(order["amount"] * rates[order["currency"]])
try:
    found = json.loads(Path("/app/totals.json").read_text())
except (OSError, ValueError) as problem:
    found = problem
print(f"expected {dict(expected)}, found {found!r:.300}")
Path("/logs/verifier/reward.txt").write_text(str(int(found == expected)))
