from .pricing import total


class Cart:
    def __init__(self):
        self.items = []

    def add(self, price, quantity=1):
        self.items.append((price, quantity))

    def total(self):
        return sum(quantity for _, quantity in self.items)

    def price(self, currency="EUR"):
        return total(self.items, 0, currency)
