import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same

DRIVER = """
import json, sys
sys.path.insert(0, ".")
import shop.pricing
from shop.cart import Cart
from shop.export import export, report, in_dollars
from shop.invoice import invoice
items, discount = json.load(sys.stdin)
cart = Cart()
[cart.add(*item) for item in items]
items = [tuple(item) for item in items]
print(json.dumps([
    hasattr(shop.pricing, "total"), cart.price(), cart.price("X"), cart.total(), invoice(cart, discount),
    export([cart, cart], discount), report(items, "plain"), report(items, "sale"), report(items, "club"),
    shop.pricing.quote(items, currency="Y"), in_dollars(items),
]))
"""


def price(items, currency, discount=0):
    amount = sum(p * q for p, q in items)
    amount -= amount * discount // 100
    return f"{amount // 100}.{amount % 100:02d} {currency}"


def old_tests_pass():
    with copy_of() as work:
        code, _, err = run([sys.executable, "-m", "unittest", "test_shop"], cwd=work)
        same(code, 0, err[-300:])


def callers_use_the_new_function():
    rng = random.Random()
    with copy_of() as work:
        for _ in range(3):
            items = [(rng.randrange(1, 9999), rng.randrange(1, 9)) for _ in range(rng.randrange(1, 6))]
            discount, pieces = rng.randrange(1, 90), sum(q for _, q in items)
            code, out, err = run([sys.executable, "-c", DRIVER], cwd=work, text=json.dumps([items, discount]))
            same(code, 0, err[-300:])
            same(
                json.loads(out),
                [
                    False,
                    price(items, "EUR"),
                    price(items, "X"),
                    pieces,
                    f"{pieces} pieces\nbefore: {price(items, 'EUR')}\ntotal: {price(items, 'EUR', discount)}",
                    {"rows": [price(items, "USD", discount)] * 2, "total": 2 * pieces},
                    price(items, "CHF"),
                    price(items, "CHF", 20),
                    price(items, "GBP", 5),
                    price(items, "Y"),
                    price(items, "USD"),
                ],
            )


main(old_tests_pass, callers_use_the_new_function)
