"""How a slot's programs come to trust the authority of hosts whose TLS the egress proxy ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from atropos.errors import NotSupported
from atropos.wire import Done, FileResult, Operation, OpResult, ReadFile, WriteFile

BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Arch, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
"""Where distributions keep the authorities that programs trust, in one file."""
OWN = "/usr/local/share/ca-certificates/atropos.crt"
"""The authority alone, where `update-ca-certificates` finds it: installing a package may run it."""


async def install(authority: bytes, run: Callable[[Operation], Awaitable[OpResult]]) -> dict[str, str]:
    """Add an authority to those of a slot's root, by operations that `run` carries out there.

    Returns:
        Variables for programs that bring authorities of their own: OpenSSL of other builds, requests, Node.

    Raises:
        NotSupported: the root can't hold it.
    """
    bundle = BUNDLES[0]
    for path in BUNDLES:
        # One byte: only whether it is there matters, and the answer has to be carried.
        if isinstance(await run(ReadFile(path=path, max_bytes=1)), FileResult):
            bundle, authorities = path, authority
            break
    else:
        # A file with the one authority alone would have programs distrust every other host.
        authorities = _own_bundle() + authority
    # Appended, not replaced: what the image trusts stays. The newline ends a last line that has none.
    done = await run(WriteFile(path=bundle, data=b"\n" + authorities, append=True, mode=0o644))
    if not isinstance(done, Done):
        raise NotSupported(f"secrets: this root can't hold the authority of their hosts: {done}")
    await run(WriteFile(path=OWN, data=authority, mode=0o644))  # a root may have it read-only
    return {"SSL_CERT_FILE": bundle, "REQUESTS_CA_BUNDLE": bundle, "NODE_EXTRA_CA_CERTS": bundle}


def _own_bundle() -> bytes:
    """This machine's authorities, for a root that has none."""
    for path in BUNDLES:
        try:
            return Path(path).read_bytes()
        except OSError:
            continue
    return b""
