# pyright: basic, reportOptionalMemberAccess=false, reportArgumentType=false
"""Start-up of every Python that a verifier runs beside an agent's folders: `sitecustomize.py` in `/.atropos/verifier`.

Modules of Python itself, and pytest's, are never taken from the agent's folders while they are found elsewhere; folders of the
image's PYTHONPATH that are the agent's come last. For Python 3.4 and later, and without effect in Python 2: so it has no
annotations.
"""

import os
import sys

try:
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec
except ImportError:
    PathFinder = None

_PYTEST = {
    "pytest",
    "_pytest",
    "pluggy",
    "iniconfig",
    "packaging",
    "exceptiongroup",
    "tomli",
    "pygments",
    "py",
    "attr",
    "attrs",
}
_STARTED = {"sitecustomize", "usercustomize"}


def _listed(name):
    return [os.path.realpath(path) for path in os.environ.get(name, "").split(":") if path]


_folders, _programs = _listed("ATROPOS_FOLDERS"), _listed("ATROPOS_PROGRAMS")
_own = set(os.environ.get("ATROPOS_MODULES", "").split(":"))
_library = os.path.dirname(os.__file__)
_stdlib = [_library, os.path.join(_library, "lib-dynload")]
_here = os.path.dirname(os.path.abspath(__file__))


def _is_in(path, folders):
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _is_the_agents(path):
    path = os.path.realpath(path or os.curdir)
    return path == "/" or (_is_in(path, _folders) and not _is_in(path, _programs))


class _ElsewhereFirst:
    """Finds some modules where the agent wrote nothing; what it doesn't find, the usual finders look for."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is not None or name in _own:
            return None
        if name in _STARTED:
            others = [each for each in sys.path if not _is_the_agents(each) and os.path.abspath(each) != _here]
            spec = PathFinder.find_spec(name, others, target)
            if spec is None:
                raise ImportError("there is no " + name, name=name)
            return spec
        if name in _PYTEST:
            return PathFinder.find_spec(name, [each for each in sys.path if not _is_the_agents(each)], target)
        return PathFinder.find_spec(name, _stdlib, target)


def _start():
    sys.meta_path.insert(0, _ElsewhereFirst)
    try:
        spec = _ElsewhereFirst.find_spec("sitecustomize")
    except ImportError:
        pass
    else:
        spec.loader.exec_module(module_from_spec(spec))
    sys.path.extend(each for each in os.environ.get("ATROPOS_PYTHON_LAST", "").split(":") if each)


if PathFinder is not None:
    _start()
