"""What a pool's configuration says of hosts."""

from __future__ import annotations

from typing import ClassVar, cast

from pydantic import Field, model_validator

from atropos.config import HostNames, split_names
from atropos.slots.plugins import BackendSettings


class SshSettings(BackendSettings):
    """Settings of the ssh backend."""

    takes_image: ClassVar[bool] = False

    ssh_hosts: HostNames = Field(default=(), description="ssh: [user@]host[:port], a container each")
    ssh_python: str = Field(
        default="python3", min_length=1, description="ssh: the hosts' Python, with this version of atropos installed"
    )
    ssh_config: str | None = Field(
        default=None, description="ssh: file with users, ports, keys and known hosts; None: ~/.ssh/config"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_container_a_host(cls, data: object) -> object:
        """With hosts, a pool's `max_containers` defaults to their number."""
        if isinstance(data, dict) and "max_containers" not in data:
            values = cast("dict[str, object]", data)
            hosts = split_names(values.get("ssh_hosts"))
            if isinstance(hosts, list | tuple) and hosts:
                return {**values, "max_containers": len(cast("list[object]", hosts))}
        return cast("object", data)
