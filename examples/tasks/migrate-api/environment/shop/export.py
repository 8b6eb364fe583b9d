import functools

import shop.pricing as p

in_dollars = functools.partial(p.total, currency="USD")
CALCULATORS = {"plain": lambda items: p.total(items, 0, "CHF"), "sale": lambda items: p.total(items, 20, "CHF")}


def export(carts, discount):
    total = 0
    rows = []
    for cart in carts:
        rows.append(in_dollars(cart.items, discount))
        total += cart.total()
    return {"rows": rows, "total": total}


def report(items, kind):
    return getattr(p, "total")(items, 5, "GBP") if kind == "club" else CALCULATORS[kind](items)
