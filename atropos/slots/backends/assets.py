"""Data files of the package: the job definition, the seccomp profile, the sandbox image's Dockerfile.

In a checkout they are in `nomad/` and `docker/`; a wheel has copies beside this module.
"""

from __future__ import annotations

from pathlib import Path

from atropos.errors import ConfigError

_ROOTS = (Path(__file__).resolve().parents[3], Path(__file__).resolve().parent / "data")


def asset(name: str) -> Path:
    """The path of a file by its name in the repository, for example `nomad/sandbox.nomad.hcl`.

    Raises:
        ConfigError: this installation doesn't have it.
    """
    for root in _ROOTS:
        if (path := root / name).is_file():
            return path
    raise ConfigError(f"{name} is not part of this installation; reinstall atropos or run from a checkout")
