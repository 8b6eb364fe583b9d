#!/bin/bash
# Makes a log of 3000 lines, the same each time.
python3 - > access.log <<'PY'
import random
r = random.Random(11)
paths = ["/", "/login", "/api/items", "/api/items?page=2", "/static/app.js", "/cart?id=7", "/search?q=a+b"]
for i in range(3000):
    if r.random() < 0.01:
        print("-- rotated --")
        continue
    status = r.choice([200] * 8 + [301, 404, 404, 500, 503])
    size = "-" if status == 301 else r.randrange(100, 50000)
    print(f'10.0.{r.randrange(3)}.{r.randrange(20)} - - [12/Mar/2025:10:{i // 60 % 60:02d}:{i % 60:02d} +0000] '
          f'"GET {r.choice(paths)} HTTP/1.1" {status} {size} "-" "agent/{r.randrange(9)}"')
PY
