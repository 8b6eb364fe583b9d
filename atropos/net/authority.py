"""A certificate authority for the hosts of one slot's secrets, whose TLS the egress proxy ends; for no other.

OpenSSL's program (3.0 or later) makes keys and certificates, which Python's ssl can't.
"""

from __future__ import annotations

import functools
import os
import ssl
import subprocess
from collections.abc import Iterable

from atropos.net.egress_policy import Rule, literal
from atropos.net.tls import server_context

PROGRAM = "openssl"
_DAYS = 365
_MAKE_S = 20.0
_MOST_HOSTS = 256
"""Hosts whose certificates are kept: a *.suffix has any number."""
_CERTIFICATE = "-----BEGIN CERTIFICATE-----"
_CONFIG = """[req]
prompt = no
distinguished_name = name
x509_extensions = extensions
[name]
CN = atropos: hosts of this slot's secrets
[extensions]
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid:always
"""


class Authority:
    """Signs for the hosts that it was made for. Its methods start a program and wait for it: call them in a thread.

    Args:
        pem: its certificate and key, as `make` made them.
    """

    def __init__(self, pem: str) -> None:
        self.pem = pem
        # One cache for each authority: a module-wide one would keep the keys of slots that have ended.
        self.context = functools.lru_cache(_MOST_HOSTS)(self._context)

    @classmethod
    def make(cls, rules: Iterable[Rule]) -> Authority:
        """A new one for these hosts.

        Raises:
            OSError: OpenSSL is missing, too old, or fails.
        """
        # Name constraints (RFC 5280, 4.2.1.10): the slot trusts it for these hosts alone, whoever gets the key.
        permitted = ",".join(f"permitted;{_constraint(rule)}" for rule in rules)
        pem = _made(
            # pathlen 0: it signs for hosts, and no further authority.
            "basicConstraints = critical,CA:TRUE,pathlen:0\nkeyUsage = critical,keyCertSign,cRLSign\n"
            f"nameConstraints = critical,{permitted}\n"
        )
        return cls(pem)

    @property
    def certificate(self) -> str:
        """Its certificate alone, in PEM."""
        return self.pem[: self.pem.index("-----BEGIN PRIVATE")]

    def _context(self, host: str) -> ssl.SSLContext:
        """What the proxy shows to a program that connects to a host (in canonical form).

        Raises:
            OSError: OpenSSL fails.
        """
        name = f"DNS:{host}" if literal(host) is None else f"IP:{host}"
        context = server_context(
            _made(
                "basicConstraints = critical,CA:FALSE\nkeyUsage = critical,digitalSignature\n"
                f"extendedKeyUsage = serverAuth\nsubjectAltName = {name}\n",
                signer=self.pem,
            )
        )
        # `server_context` asks for 1.3, which programs in old images don't speak.
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # The proxy reads HTTP/1.1 alone; without ALPN a client might begin with HTTP/2.
        context.set_alpn_protocols(["http/1.1"])
        return context


def _constraint(rule: Rule) -> str:
    if rule.network is None:
        return f"DNS:{rule.host.removeprefix('*.')}"
    return f"IP:{rule.network.network_address}/{rule.network.netmask}"


def _made(extensions: str, signer: str | None = None) -> str:
    """A certificate and its new key, in PEM. `signer`: those of the authority that signs; None: itself."""
    command = [PROGRAM, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", str(_DAYS), "-config", "/dev/stdin", "-keyout", "/dev/stdout"]
    # The key is never a file or an argument, which other processes could read.
    held = os.memfd_create("signer")
    try:
        if signer is not None:
            os.write(held, signer.encode())
            command += ["-CA", f"/dev/fd/{held}", "-CAkey", f"/dev/fd/{held}"]
        done = subprocess.run(
            command,
            input=f"{_CONFIG}{extensions}",
            capture_output=True,
            check=False,
            pass_fds=[held],
            text=True,
            timeout=_MAKE_S,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{PROGRAM} took more than {_MAKE_S:g} s") from None
    finally:
        os.close(held)
    key, separator, certificate = done.stdout.partition(_CERTIFICATE)
    if done.returncode or not separator:
        raise OSError(f"{PROGRAM} can't make a certificate: {done.stderr.strip()[-300:]}")
    return f"{separator}{certificate}{key}"
