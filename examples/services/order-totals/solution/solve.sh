#!/bin/bash
python3 - <<'END'
import collections, json, urllib.request

def ask(url):
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)

rates, totals, page = ask("http://rates/rates.json"), collections.Counter(), 1
while page is not None:
    found = ask(f"http://orders:8000/orders?page={page}")
    for order in found["orders"]:
        totals[order["customer"]] += int(order["amount"] * rates[order["currency"]])
    page = found["next"]
with open("/app/totals.json", "w") as file:
    json.dump(totals, file)
END
