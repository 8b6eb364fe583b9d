"""A double-entry ledger in whole cents."""

from decimal import Decimal


class LedgerError(ValueError):
    """A posting that must not be made; the ledger is unchanged."""


def cents(text):
    """Cents of an amount written as a decimal number: cents("12.30") == 1230. More than two decimals: LedgerError."""
    return int(float(text) * 100)


class Ledger:
    """Accounts by name. Money only moves: the sum over all accounts is always 0."""

    def __init__(self, entries=[]):
        self.entries = entries

    def transfer(self, source, target, amount, *, overdraft=True):
        """Move `amount` cents. LedgerError for amounts of 0 or less, the same account twice, or, with
        overdraft=False, when the source would fall below 0."""
        if amount < 0:
            raise LedgerError("the amount must be positive")
        self.entries.append((source, -amount))
        if not overdraft and self.balance(source) < 0:
            raise LedgerError(f"{source} would be overdrawn")
        self.entries.append((target, amount))

    def balance(self, account):
        """Balance in cents; 0 for an account that was never used."""
        return sum(amount for name, amount in self.entries if name.startswith(account))

    def accounts(self):
        """Names of all accounts ever used, sorted."""
        return sorted(name for name, _ in self.entries)
