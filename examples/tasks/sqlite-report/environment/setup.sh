#!/bin/bash
python3 - <<'PY'
import random
import sqlite3
r = random.Random(5)
db = sqlite3.connect("shop.db")
db.executescript("create table customers(id integer primary key, name text, country text);"
                 "create table orders(id integer primary key, customer_id integer, day text, status text);"
                 "create table items(order_id integer, sku text, quantity integer, cents integer);")
for i in range(1, 41):
    db.execute("insert into customers values(?,?,?)", (i, r.choice(["Ann", "Ben", "Cy", "Di", "Eve"]), r.choice(["DE", "FR", "PL"])))
for i in range(1, 201):
    db.execute("insert into orders values(?,?,?,?)", (i, r.randrange(1, 36), f"2025-{r.randrange(1, 13):02d}-{r.randrange(1, 28):02d}", r.choice(["paid", "open", "cancelled"])))
    for _ in range(r.randrange(0, 4)):
        db.execute("insert into items values(?,?,?,?)", (i, f"S{r.randrange(9)}", r.randrange(1, 5), r.randrange(100, 9999)))
db.commit()
PY
