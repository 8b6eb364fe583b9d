#!/bin/bash
set -e
cd /workspace
cat > ledger.py <<'PY'
"""A double-entry ledger in whole cents."""

from decimal import Decimal


class LedgerError(ValueError):
    """A posting that must not be made; the ledger is unchanged."""


def cents(text):
    """Cents of an amount written as a decimal number: cents("12.30") == 1230. More than two decimals: LedgerError."""
    value = Decimal(text) * 100
    if value != int(value):
        raise LedgerError(f"{text} has more than two decimals")
    return int(value)


class Ledger:
    """Accounts by name. Money only moves: the sum over all accounts is always 0."""

    def __init__(self, entries=()):
        self.entries = list(entries)

    def transfer(self, source, target, amount, *, overdraft=True):
        """Move `amount` cents. LedgerError for amounts of 0 or less, the same account twice, or, with
        overdraft=False, when the source would fall below 0."""
        if amount <= 0:
            raise LedgerError("the amount must be positive")
        if source == target:
            raise LedgerError("an account can't pay itself")
        if not overdraft and self.balance(source) < amount:
            raise LedgerError(f"{source} would be overdrawn")
        self.entries.append((source, -amount))
        self.entries.append((target, amount))

    def balance(self, account):
        """Balance in cents; 0 for an account that was never used."""
        return sum(amount for name, amount in self.entries if name == account)

    def accounts(self):
        """Names of all accounts ever used, sorted."""
        return sorted({name for name, _ in self.entries})
PY
python3 -m unittest
