"""Files that are not Python but belong to the package: the job definition, the seccomp profile, the image's recipe.

In a checkout they lie where a person looks for them (`nomad/`, `docker/`); a wheel carries copies beside this module.
"""

from __future__ import annotations

from pathlib import Path

from atropos.errors import ConfigError

_ROOTS = (Path(__file__).resolve().parents[3], Path(__file__).resolve().parent / "data")


def asset(name: str) -> Path:
    """The path of a file by its name in the repository, for example `nomad/sandbox.nomad.hcl`.

    Raises:
        ConfigError: this installation doesn't carry it.
    """
    for root in _ROOTS:
        if (path := root / name).is_file():
            return path
    raise ConfigError(f"{name} is not part of this installation; reinstall atropos or run from a checkout")
