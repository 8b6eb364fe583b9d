"""Containers as processes of this machine in a Singularity or Apptainer image: the local backend on an image's programs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from atropos.errors import ConfigError
from atropos.slots.backends.local.backend import LocalBackend
from atropos.slots.config import SlotPoolConfig

PROGRAMS = ("apptainer", "singularity")
SERVER = ("python3", "-P", "-m", "atropos.sandbox", "--config", "-")


class SingularityBackend(LocalBackend):
    """Supervised sandbox servers in an image; slots start from what is in it."""

    name = "singularity"

    async def start(self) -> None:
        """Find the program and the image, and make a scratch folder, as the local backend."""
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
            *SERVER,
        )


def _privileges() -> tuple[str, ...]:
    """Root keeps its ids, of which slots get a range; anybody else is in a user namespace of one id."""
    # as root, all capabilities would be asked for; slots need no such one, and roots of virtual machines often lack it
    return ("--drop-caps", "CAP_SYS_RESOURCE") if os.geteuid() == 0 else ("--userns",)
