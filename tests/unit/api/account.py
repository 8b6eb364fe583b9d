"""An account without quotas or audit log, as a server's own token has it."""

from __future__ import annotations

from atropos.api.accounts.account import Account
from atropos.api.accounts.audit import AuditLog
from atropos.api.accounts.keys import KeySettings
from atropos.slots import Share


def own_account() -> Account:
    return Account("token", KeySettings(admin=True), (), Share(), AuditLog(None))
