"""One key's account: its share of the pool, the rate of its requests, and what is noted of it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator
from dataclasses import dataclass, field

from atropos.api.accounts.audit import AuditLog
from atropos.api.accounts.keys import KeySettings
from atropos.api.gate import Bodies
from atropos.api.http import Refusal, TokenBucket
from atropos.errors import code_of
from atropos.slots import EgressSecret, Share

_log = logging.getLogger(__name__)
FREQUENT = frozenset({"call", "command", "file"})
"""Events that the audit log has, and the server's log has not."""


@dataclass
class Latest:
    """The latest call or command of a trajectory or sandbox, in a line; for admins."""

    line: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def age_s(self) -> float:
        """Seconds since it began; 0 where there was none."""
        return time.monotonic() - self.began if self.line else 0.0


class Account:
    """What the holder of one key may use, and does.

    Args:
        name: the key's.
        key: its settings.
        secrets: of its leases, as their files have them.
        share: its leases' share of the pool.
        audit: where its doings are noted.
    """

    def __init__(
        self, name: str, key: KeySettings, secrets: tuple[EgressSecret, ...], share: Share, audit: AuditLog
    ) -> None:
        self.name = name
        self.share = share
        self.bodies = Bodies()
        self._audit = audit
        self.change(key, secrets)

    def change(self, key: KeySettings, secrets: tuple[EgressSecret, ...]) -> None:
        """Apply new settings; existing leases stay."""
        self.key = key
        self.share.quotas = key
        self.share.secrets = secrets
        self._bucket = TokenBucket(key.rate_per_s, key.burst)

    def refused(self) -> Refusal | None:
        """Count a request; why it is refused, if it is."""
        if (wait_s := self._bucket.take()) == 0:
            return None
        text = f"at most {self.key.rate_per_s:g} requests a second of this key; retry later"
        return Refusal(429, "rate_limited", text, retry_after_s=wait_s)

    @contextlib.contextmanager
    def noting_refusals(self, what: str, subject: str, **more: object) -> Generator[None]:
        """Around what is asked for (a shell, an image): the audit log has it, if it is refused, and why."""
        try:
            yield
        except Exception as error:
            self.note(f"{what}.refused", subject, **more, outcome=getattr(error, "code", None) or code_of(error))
            raise

    def note(self, event: str, subject: str, **what: object) -> None:
        """Write what was done to a sandbox, trajectory or image (its id) to the audit log; log rare events, too."""
        self._audit.write(key=self.name, event=event, id=subject, **what)
        if event not in FREQUENT:
            _log.info(
                "%s: %s %s %s", self.name, event, subject, " ".join(f"{name}={each}" for name, each in what.items())
            )
