"""A key's secrets: files of the operator's, whose contents the egress proxy puts into requests of the key's slots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic import Field, SecretStr

from atropos.api.settings import SettingsModel
from atropos.errors import ConfigError
from atropos.wire import EgressSecret


class SecretSettings(SettingsModel):
    """One secret of a key. It is in a file of its own, so that the keys file holds none."""

    hosts: tuple[str, ...] = Field(
        description="whose requests get it: names, *.suffixes, addresses, each with :PORT or not"
    )
    file: str = Field(description="the file that it is in, alone; spaces and lines around it are left out")
    header: str = Field(default="authorization", description="the header that it goes into")
    prefix: str = Field(default="", description="what the header has before it, as `Bearer `")
    username: str | None = Field(default=None, description="it is this user's password, for basic authentication")
    tls: bool = Field(default=False, description="for requests by TLS, which the egress proxy ends for these hosts")

    def read(self) -> EgressSecret:
        """The secret, as its file has it now.

        Raises:
            ConfigError: it is none.
            OSError: the file can't be read.
        """
        value = Path(self.file).read_text(encoding="ascii").strip()
        if self.username is not None:
            return EgressSecret.basic(self.hosts, self.username, value, tls=self.tls)
        return EgressSecret(hosts=self.hosts, value=SecretStr(self.prefix + value), header=self.header, tls=self.tls)


def read_secrets(secrets: Mapping[str, SecretSettings], what: str) -> tuple[EgressSecret, ...]:
    """A key's secrets. `what`: whose, for messages.

    Raises:
        ConfigError: a file can't be read, or a setting is wrong; names it, without the secret.
    """
    parsed: list[EgressSecret] = []
    for name, each in secrets.items():
        where = f"{what}.secrets.{name}"
        try:
            parsed.append(each.read())
        except UnicodeDecodeError:
            raise ConfigError(f"{where}: {each.file} has more than ASCII") from None
        except OSError as error:
            raise ConfigError(f"{where}.file: {each.file}: {error.strerror}") from None
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return tuple(parsed)
