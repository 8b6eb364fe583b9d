"""Prices in whole cents."""


def total(items, discount, currency):
    """The old way. Use `quote`."""
    return quote(items, currency=currency, discount=discount)


def quote(items, *, currency, discount=0):
    """Sum of price x quantity, less `discount` percent (rounded down), as text with the currency."""
    amount = sum(price * quantity for price, quantity in items)
    amount -= amount * discount // 100
    return f"{amount // 100}.{amount % 100:02d} {currency}"
