"""How a slot's programs come to trust the authority of hosts whose TLS the egress proxy ends."""

from __future__ import annotations

from pathlib import Path

BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Arch, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
"""Where distributions keep the authorities that programs trust, in one file."""
OWN = "/usr/local/share/ca-certificates/atropos.crt"
"""The authority alone, where `update-ca-certificates` finds it: installing a package may run it."""


def environment(bundle: str) -> dict[str, str]:
    """Variables for programs that bring authorities of their own: OpenSSL of other builds, requests, Node."""
    return {"SSL_CERT_FILE": bundle, "REQUESTS_CA_BUNDLE": bundle, "NODE_EXTRA_CA_CERTS": bundle}


def own_bundle() -> bytes:
    """This machine's authorities, for a root that has none."""
    for path in BUNDLES:
        try:
            return Path(path).read_bytes()
        except OSError:
            continue
    return b""
