"""Talking to one sandbox server: leases over HTTP, calls over one stream."""

from atropos.slots.client.sandbox_client import SandboxClient

__all__ = ["SandboxClient"]
