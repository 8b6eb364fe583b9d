"""A secret for hosts, which the egress proxy puts into a slot's requests."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Annotated, Self

from pydantic import ConfigDict, Field, PlainSerializer, SecretStr, model_validator

from atropos.net.secrets import check_header, check_value, host_rule
from atropos.wire.base import MadeByUsers, WireMessage

__all__ = [
    "MAX_SECRETS",
    "EgressSecret",
]

MAX_SECRETS = 16
"""Most secrets of one lease."""
_Value = Annotated[
    SecretStr, Field(max_length=2000), PlainSerializer(SecretStr.get_secret_value, return_type=str, when_used="json")
]


class EgressSecret(MadeByUsers, WireMessage):
    """A header that the slot's requests to some hosts get on their way out; the slot never has it.

    `tls`: the requests are made by TLS, which the egress proxy ends for these hosts.

    Raises:
        ConfigError: a host, the header or the value is none; the message is without the value.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    hosts: tuple[Annotated[str, Field(max_length=270)], ...] = Field(
        min_length=1, max_length=8, description="names, *.suffixes and addresses, each with :PORT or not"
    )
    value: _Value = Field(description="the header's value, as `Bearer TOKEN`")
    header: str = Field(default="authorization", description="the header's name")
    tls: bool = Field(default=False, description="for requests by TLS (port 443), else without (port 80)")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for host in self.hosts:
            host_rule(host, tls=self.tls)
        check_header(self.header)
        check_value(self.value.get_secret_value())
        return self

    @classmethod
    def basic(cls, hosts: Iterable[str], username: str, password: str, *, tls: bool = False) -> EgressSecret:
        """A user name and a password, by HTTP's basic authentication."""
        text = base64.b64encode(f"{username}:{password}".encode()).decode()
        return cls(hosts=tuple(hosts), value=SecretStr(f"Basic {text}"), tls=tls)
