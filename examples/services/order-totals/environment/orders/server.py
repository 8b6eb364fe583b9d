"""A shop's orders, other ones at each start: in pages for everyone, at once for the auditor."""

import http.server
import json
import os
import random
from urllib.parse import parse_qs, urlsplit

PAGE = 20
CUSTOMERS = ("ada", "grace", "edsger", "barbara", "tony")
ORDERS = [
    {
        "id": number,
        "customer": random.choice(CUSTOMERS),
        "amount": random.randrange(100, 100_000, 4),
        "currency": random.choice(("EUR", "USD", "GBP")),
    }
    for number in range(1, random.randrange(80, 120))
]


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        asked = urlsplit(self.path)
        page = parse_qs(asked.query).get("page", ["1"])[0]
        if asked.path == "/orders" and page.isdecimal() and int(page) > 0:
            start = (int(page) - 1) * PAGE
            more = start + PAGE < len(ORDERS)
            self.answer(200, {"orders": ORDERS[start : start + PAGE], "next": int(page) + 1 if more else None})
        elif asked.path == "/audit" and self.headers["Authorization"] == os.environ["AUDITOR"]:
            self.answer(200, ORDERS)
        else:
            self.answer(404, {})

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
