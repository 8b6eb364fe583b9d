"""TLS of the sandbox port: a server shows one certificate, and clients trust only that one, whatever names it has."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from atropos.errors import ConfigError


def read_pair(certificate: str | None, key: str | None) -> tuple[str, str] | None:
    """The texts of a certificate's and its key's file; None: there are none.

    Raises:
        ConfigError: a file can't be read, or they are no pair; the message names the setting and the cure.
    """
    if certificate is None or key is None:
        return None
    texts: list[str] = []
    for setting, path in (("tls_certificate", certificate), ("tls_key", key)):
        try:
            texts.append(Path(path).read_text(encoding="ascii").strip() + "\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}: {path} can't be read: {error}; name a PEM file") from None
    try:
        client_context(texts[0])
    except ssl.SSLError as error:
        raise ConfigError(f"tls_certificate: {certificate} holds no certificate in PEM ({error.reason})") from None
    try:
        server_context("".join(texts))
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_key: {key} is not the unencrypted key of {certificate} ({error.reason}); "
            "docs/cluster.md shows how to make both"
        ) from None
    return texts[0], texts[1]


def server_context(pem: str) -> ssl.SSLContext:
    """What a server shows: its certificate and key, one after the other.

    Raises:
        ssl.SSLError: they are no pair.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    held = os.memfd_create("tls")  # the ssl module reads files alone
    try:
        os.write(held, pem.encode())
        # An encrypted key is refused: without a password function OpenSSL would ask on the terminal.
        context.load_cert_chain(f"/proc/self/fd/{held}", password=lambda: "")
    finally:
        os.close(held)
    return context


def client_context(certificate: str) -> ssl.SSLContext:
    """Trusts this certificate alone. Containers have addresses that nobody knows ahead, so names are not compared.

    Raises:
        ssl.SSLError: it is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # also one that an authority signed, without the authority
    context.load_verify_locations(cadata=certificate)
    return context
