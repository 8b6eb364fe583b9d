import hashlib
import json
import random
import sqlite3
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, give, main, run, same


def database(path, rng, customers, orders, statuses=("paid", "open", "cancelled")):
    people = [
        (i, rng.choice(["Ann", "Ben", "Cy"]), rng.choice(["DE", "FR", "PL", "\u00d6"])) for i in range(1, customers + 1)
    ]
    bought, items = [], []
    for i in range(1, orders + 1):
        bought.append(
            (
                i,
                rng.randrange(1, customers),
                f"{rng.choice([2024, 2025])}-{rng.randrange(1, 13):02d}-03",
                rng.choice(statuses),
            )
        )
        items += [
            (i, f"K{rng.randrange(5)}", rng.randrange(1, 4), rng.randrange(1, 500)) for _ in range(rng.randrange(0, 4))
        ]
    with sqlite3.connect(path) as db:
        db.executescript(
            "create table customers(id integer primary key, name text, country text);"
            "create table orders(id integer primary key, customer_id integer, day text, status text);"
            "create table items(order_id integer, sku text, quantity integer, cents integer);"
        )
        db.executemany("insert into customers values(?,?,?)", people)
        db.executemany("insert into orders values(?,?,?,?)", bought)
        db.executemany("insert into items values(?,?,?,?)", items)
    paid = {o[0]: o[1] for o in bought if o[3] == "paid"}
    spent, pieces = Counter(), Counter()
    for order, sku, quantity, cents in items:
        if order in paid:
            spent[paid[order]] += quantity * cents
            pieces[sku] += quantity
    revenue = {country: 0 for _, _, country in people}
    for number, _, country in people:
        revenue[country] += spent[number]
    spent = +spent
    ordered = {o[1] for o in bought}
    months = Counter(o[2][:7] for o in bought)
    names = {p[0]: p[1] for p in people}
    return {
        "revenue": revenue,
        "best_customer": names[min(spent, key=lambda n: (-spent[n], n))] if spent else None,
        "never_ordered": sorted(p[1] for p in people if p[0] not in ordered),
        "busiest_month": min(months, key=lambda m: (-months[m], m)) if months else None,
        "top_skus": [list(i) for i in sorted(pieces.items(), key=lambda i: (-i[1], i[0]))[:3]],
    }


def reports_fresh_databases():
    rng = random.Random()
    with copy_of() as work:
        for number, (customers, orders, statuses) in enumerate(
            [(30, 150, ("paid", "open")), (5, 6, ("paid", "cancelled")), (4, 5, ("open",)), (3, 0, ("paid",))]
        ):
            path = work / f"fresh{number}.db"
            expected = database(path, rng, customers, orders, statuses)
            give(path)
            before = hashlib.sha256(path.read_bytes()).digest()
            code, out, err = run([sys.executable, "report.py", path.name], cwd=work)
            same(code, 0, err[-300:])
            got = json.loads(out)
            for field, value in expected.items():
                same(got[field], value, field)
            same(hashlib.sha256(path.read_bytes()).digest(), before, "the database")


main(reports_fresh_databases)
