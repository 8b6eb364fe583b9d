import unittest

from shop.cart import Cart
from shop.export import export, report
from shop.invoice import invoice


class ShopTest(unittest.TestCase):
    def setUp(self):
        self.cart = Cart()
        self.cart.add(1999, 2)
        self.cart.add(500)

    def test_cart(self):
        self.assertEqual(self.cart.price(), "44.98 EUR")
        self.assertEqual(self.cart.total(), 3)

    def test_invoice(self):
        self.assertEqual(invoice(self.cart, 10), "3 pieces\nbefore: 44.98 EUR\ntotal: 40.49 EUR")

    def test_export(self):
        self.assertEqual(export([self.cart], 50), {"rows": ["22.49 USD"], "total": 3})

    def test_report(self):
        self.assertEqual(report(self.cart.items, "sale"), "35.99 CHF")
        self.assertEqual(report(self.cart.items, "club"), "42.74 GBP")


if __name__ == "__main__":
    unittest.main()
