"""Every module of the package can be imported, and says what it is for."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import atropos

PROGRAM = "atropos.slots.slot.port_relay"
"""Its source runs in a slot, with arguments; it is never imported."""


def test_every_module_is_imported_or_names_the_package_that_it_lacks() -> None:
    def failed(name: str) -> None:
        raise AssertionError(f"the package {name} can't be imported")

    names = [found.name for found in pkgutil.walk_packages(atropos.__path__, "atropos.", failed)]
    assert len(names) > 200
    for name in sorted(set(names) - {PROGRAM}):
        try:
            module = import_module(name)
        except ImportError as error:  # an extra that this environment has not got
            assert name.startswith("atropos.adapters."), name
            assert not (error.name or "").startswith("atropos"), error
        else:
            assert module.__doc__, f"{name} says nothing of itself"
