"""The address, credentials and TLS settings of Nomad: the NOMAD_* variables of its own tools."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from atropos.errors import ConfigError

DEFAULT_ADDRESS = "http://localhost:4646"


@dataclass(frozen=True)
class NomadAccess:
    """Settings of Nomad's HTTP API, named after the variables of its command line."""

    address: str = DEFAULT_ADDRESS
    token: str | None = None
    namespace: str = "default"
    region: str | None = None
    cacert: str | None = None
    capath: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    tls_server_name: str | None = None
    skip_verify: bool = False

    def __repr__(self) -> str:
        return f"NomadAccess({self.shown}, namespace={self.namespace}, region={self.region})"

    @classmethod
    def from_environment(cls, address: str | None) -> NomadAccess:
        """Settings from the environment; `address` takes precedence over NOMAD_ADDR.

        Raises:
            ConfigError: the address is no http(s) URL, or a certificate can't be read.
        """
        env = {name: value.strip() for name, value in os.environ.items() if name.startswith("NOMAD_")}
        address = (address or env.get("NOMAD_ADDR") or DEFAULT_ADDRESS).rstrip("/")
        try:
            parts = urlsplit(address)
            valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of the port, or an IPv6 address
            valid = False
        if not valid:
            raise ConfigError(f"nomad_address {address!r} must look like http://host:4646 or https://host:4646")
        access = cls(
            address=address,
            token=env.get("NOMAD_TOKEN") or None,
            namespace=env.get("NOMAD_NAMESPACE") or "default",
            region=env.get("NOMAD_REGION") or None,
            cacert=env.get("NOMAD_CACERT") or None,
            capath=env.get("NOMAD_CAPATH") or None,
            client_cert=env.get("NOMAD_CLIENT_CERT") or None,
            client_key=env.get("NOMAD_CLIENT_KEY") or None,
            tls_server_name=env.get("NOMAD_TLS_SERVER_NAME") or None,
            skip_verify=env.get("NOMAD_SKIP_VERIFY", "").lower() in {"1", "t", "true"},
        )
        if bool(access.client_cert) != bool(access.client_key):
            raise ConfigError("NOMAD_CLIENT_CERT and NOMAD_CLIENT_KEY belong together: set both or none")
        # Once at the start, so that a wrong file is named here and not in a request's error.
        access.tls()
        return access

    @property
    def shown(self) -> str:
        """The address for people: without the user and password that it may carry for a proxy before the agent."""
        parts = urlsplit(self.address)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    @property
    def host(self) -> str:
        """The name or address of the agent's machine."""
        return urlsplit(self.address).hostname or ""

    @property
    def local(self) -> bool:
        """Whether the agent is on this machine, so that paths here are paths there."""
        return self.host in {"localhost", "::1"} or self.host.startswith("127.")

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context with CA and client certificate; None without https."""
        if not self.address.startswith("https:"):
            return None
        if self.capath and not os.path.isdir(self.capath):
            raise ConfigError(f"NOMAD_CAPATH: {self.capath} is no folder of CA certificates")
        try:
            context = ssl.create_default_context(cafile=self.cacert, capath=self.capath)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"NOMAD_CACERT: {self.cacert} can't be used: {_why(error)}") from error
        if self.client_cert:
            for name, path in (("NOMAD_CLIENT_CERT", self.client_cert), ("NOMAD_CLIENT_KEY", self.client_key)):
                if not os.access(path or "", os.R_OK):
                    raise ConfigError(f"{name}: {path} can't be read: it must be a PEM file")
            try:
                context.load_cert_chain(self.client_cert, self.client_key)
            except OSError as error:
                raise ConfigError(
                    f"NOMAD_CLIENT_CERT, NOMAD_CLIENT_KEY: {self.client_cert} and {self.client_key} "
                    f"are no certificate with its key: {_why(error)}"
                ) from error
        if self.skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _why(error: OSError) -> str:
    """Why a file can't be used, in a few words."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return error.strerror or str(error)
