#!/bin/bash
set -e
cd /workspace
cat > report.py <<'PY'
import json
import sqlite3
import sys

db = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
PAID = "from orders o join items i on i.order_id = o.id where o.status = 'paid'"
revenue = {country: 0 for (country,) in db.execute("select distinct country from customers")}
by_customer = dict(db.execute(f"select o.customer_id, sum(i.quantity * i.cents) {PAID} group by o.customer_id"))
names, countries = {}, {}
for number, name, country in db.execute("select id, name, country from customers"):
    names[number] = name
    revenue[country] += by_customer.get(number, 0)
known = {number: total for number, total in by_customer.items() if number in names}
best = min(known, key=lambda number: (-known[number], number)) if known else None
month = db.execute("select substr(day, 1, 7) m from orders group by m order by count(*) desc, m limit 1").fetchone()
print(json.dumps({
    "revenue": revenue,
    "best_customer": names[best] if best is not None else None,
    "never_ordered": sorted(n for (n,) in db.execute(
        "select name from customers c where not exists (select 1 from orders o where o.customer_id = c.id)")),
    "busiest_month": month[0] if month else None,
    "top_skus": [list(row) for row in db.execute(
        f"select i.sku, sum(i.quantity) pieces {PAID} group by i.sku order by pieces desc, i.sku limit 3")],
}))
PY
python3 report.py shop.db
