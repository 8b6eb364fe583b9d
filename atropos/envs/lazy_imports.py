"""What atroposlib imports at once and an environment may never use: it loads when it is used.

`import transformers` reads all files of its models (2,552 in 5.23) for a table of its names. atroposlib takes two of
them, and their modules load without that table. wandb loads in environments that log to it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec
from types import MappingProxyType, ModuleType

# Where the names stand that atroposlib, and these modules themselves, take from it (in transformers 5 and 4).
_PLACES = MappingProxyType(
    {
        "AddedToken": ("transformers.tokenization_utils_base",),
        "AutoTokenizer": ("transformers.models.auto.tokenization_auto",),
        "PreTrainedTokenizer": ("transformers.tokenization_python", "transformers.tokenization_utils"),
    }
)


def import_lazily() -> None:
    """Have wandb and transformers load by what is used of them, unless the program has imported them itself."""
    _hold_back("wandb")
    package = _hold_back("transformers", _PLACES)
    if package is not None:
        with contextlib.suppress(PackageNotFoundError):
            package.__version__ = version("transformers")  # type: ignore[attr-defined]
        package.models = _hold_back("transformers.models")  # type: ignore[attr-defined]


def _hold_back(name: str, places: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> ModuleType | None:
    """Return the package, not yet run: what is in it can be imported; a name that `places` lacks has it run."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None or (loader := spec.loader) is None:
        return None
    package = sys.modules[name] = module_from_spec(spec)

    def attribute(wanted: str) -> object:
        for place in places.get(wanted, ()):
            if find_spec(place) is not None:
                return getattr(import_module(place), wanted)
        del package.__getattr__
        loader.exec_module(package)
        if sys.modules[name] is not package:  # transformers puts another module there
            package.__getattr__ = partial(getattr, sys.modules[name])  # type: ignore[method-assign]
        return getattr(sys.modules[name], wanted)

    package.__getattr__ = attribute  # type: ignore[method-assign]
    return package
