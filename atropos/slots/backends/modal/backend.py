"""Modal's sandboxes as containers: a sandbox server in each, reached through its tunnel."""

from __future__ import annotations

from atropos.errors import ConfigError
from atropos.slots.backends.modal.server import ModalServer
from atropos.slots.backends.server_http import ServerHttp
from atropos.slots.backends.supervised import SupervisedBackend, SupervisedServer
from atropos.slots.config import SlotPoolConfig


class ModalBackend(SupervisedBackend):
    """Supervised sandbox servers, one in each Modal sandbox, which ends with its server."""

    name = "modal"
    stop_more_s = 5.0

    def __init__(self, config: SlotPoolConfig) -> None:
        super().__init__(config)
        self._http = ServerHttp()

    async def start(self) -> None:
        """Check the image's name; the first request to Modal starts a container."""
        if self.config.image == SlotPoolConfig.model_fields["image"].default:
            raise ConfigError(
                f"image (an env's sandbox_image): Modal pulls it from a registry, where {self.config.image!r} is not: "
                "push what `make image` builds, and give its name there"
            )

    async def launch(self, index: int, token: str) -> SupervisedServer:
        """A server in a new sandbox, which ends with it."""
        del index
        return ModalServer(self.config, self.remote_config(token), self._http)

    async def aclose(self, *, purge: bool) -> None:
        """End all sandboxes, whether `purge` or not."""
        try:
            await super().aclose(purge=purge)
        finally:
            await self._http.close()
