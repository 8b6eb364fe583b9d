import unittest

from ledger import Ledger, LedgerError, cents


class LedgerTest(unittest.TestCase):
    def test_cents(self):
        self.assertEqual(cents("12.30"), 1230)
        self.assertEqual(cents("0.29"), 29)

    def test_transfer(self):
        ledger = Ledger()
        ledger.transfer("bank", "rent", 500)
        self.assertEqual(ledger.balance("bank"), -500)
        self.assertEqual(ledger.balance("rent"), 500)

    def test_ledgers_are_separate(self):
        self.assertEqual(Ledger().balance("bank"), 0)

    def test_zero_is_refused(self):
        with self.assertRaises(LedgerError):
            Ledger().transfer("a", "b", 0)

    def test_accounts(self):
        ledger = Ledger()
        ledger.transfer("b", "a", 1)
        ledger.transfer("b", "a", 2)
        self.assertEqual(ledger.accounts(), ["a", "b"])


if __name__ == "__main__":
    unittest.main()
