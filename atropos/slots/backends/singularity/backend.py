"""Containers as processes of this machine in a Singularity or Apptainer image: the local backend with an image."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from atropos.errors import ConfigError
from atropos.slots.backends.local.backend import LocalBackend
from atropos.slots.backends.spec import SERVER_COMMAND
from atropos.slots.config import SlotPoolConfig

PROGRAMS = ("apptainer", "singularity")


class SingularityBackend(LocalBackend):
    """Supervised sandbox servers in an image, which is also the slots' base."""

    name = "singularity"

    async def start(self) -> None:
        """Find the program and the image, then start as the local backend does."""
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise ConfigError("backend: 'singularity' needs apptainer or singularity, and neither is on PATH")
        image = self.config.image
        if image == SlotPoolConfig.model_fields["image"].default:
            raise ConfigError(
                "image (an env's sandbox_image): name the file that `make sif` builds, atropos-sandbox.sif"
            )
        if not Path(image).exists():
            raise ConfigError(f"image (an env's sandbox_image): there is no {image}; `make sif` builds one")
        await super().start()
        folders = [self.scratch, *filter(None, [self.config.image_store.folder])]
        binds = [word for folder in folders for word in ("--bind", str(folder))]
        self.command = (
            program,
            "exec",
            "--cleanenv",
            "--no-home",
            *_privileges(),
            *binds,
            os.path.abspath(image),
            *SERVER_COMMAND,
        )


def _privileges() -> tuple[str, ...]:
    """Root keeps its ids, a range of which slots get; other users are in a user namespace of one id."""
    # without it, root asks for all capabilities, of which virtual machines often lack this one, and slots don't need it
    return ("--drop-caps", "CAP_SYS_RESOURCE") if os.geteuid() == 0 else ("--userns",)
