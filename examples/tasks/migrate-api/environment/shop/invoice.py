from shop import pricing
from shop.pricing import total as price_of


def invoice(cart, discount):
    lines = [f"{cart.total()} pieces"]
    lines.append("before: " + price_of(cart.items, currency="EUR", discount=0))
    lines.append("total: " + pricing.total(cart.items, discount, "EUR"))
    return "\n".join(lines)
