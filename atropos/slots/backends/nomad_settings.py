"""Where Nomad is and how to speak to it: the NOMAD_* variables that its own tools read."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from atropos.errors import ConfigError

DEFAULT_ADDRESS = "http://localhost:4646"


@dataclass(frozen=True)
class NomadSettings:
    """How to reach Nomad's HTTP API; the fields are named after the variables of Nomad's own command line."""

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
        return f"NomadSettings({self.address}, namespace={self.namespace}, region={self.region})"

    @classmethod
    def from_environment(
        cls, address: str | None = None, environment: Mapping[str, str] | None = None
    ) -> NomadSettings:
        """Settings from the environment; an address that was given wins over NOMAD_ADDR.

        Raises:
            ConfigError: the address is no http(s) URL, or a certificate can't be read.
        """
        env = os.environ if environment is None else environment
        address = (address or env.get("NOMAD_ADDR") or DEFAULT_ADDRESS).rstrip("/")
        parts = urlsplit(address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"nomad_address {address!r} must look like http://host:4646 or https://host:4646")
        settings = cls(
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
        if bool(settings.client_cert) != bool(settings.client_key):
            raise ConfigError("NOMAD_CLIENT_CERT and NOMAD_CLIENT_KEY belong together: set both or none")
        settings.tls()
        return settings

    @property
    def local(self) -> bool:
        """Whether the agent is on this machine, so that paths here are paths there."""
        host = urlsplit(self.address).hostname or ""
        return host in {"localhost", "::1"} or host.startswith("127.")

    def tls(self) -> ssl.SSLContext | None:
        """How to check the agent and who to be; None without https."""
        if not self.address.startswith("https:"):
            return None
        try:
            context = ssl.create_default_context(cafile=self.cacert, capath=self.capath)
            if self.client_cert:
                context.load_cert_chain(self.client_cert, self.client_key)
        except (OSError, ssl.SSLError) as error:
            names = "NOMAD_CACERT, NOMAD_CAPATH, NOMAD_CLIENT_CERT or NOMAD_CLIENT_KEY"
            raise ConfigError(f"{names} can't be used: {error}") from error
        if self.skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context
