# pyright: basic, reportOptionalMemberAccess=false, reportArgumentType=false
"""Start-up of every Python that a verifier runs beside an agent's folders: `sitecustomize.py` in `/.atropos/verifier`.

What is installed comes before what lies in the agent's folders, and what installed code imports is never found there by
chance of the working folder; folders of the image's PYTHONPATH that are the agent's come last. Packages that the agent
installed are found by its own code alone. For that code the order is Python's usual one. What tests put into such a
folder comes before what was there. For Python 3.5 and later, and without effect in Python 2: so it has no annotations.
"""

import os
import sys

try:  # what every Python has loaded already
    import _imp
    from _frozen_importlib import module_from_spec
    from _frozen_importlib_external import PathFinder, SourceFileLoader, spec_from_file_location
except ImportError:
    PathFinder = None
try:
    _NotFound = ModuleNotFoundError
except NameError:  # before Python 3.6
    _NotFound = ImportError

_STARTED = {"sitecustomize", "usercustomize"}


def _listed(name):
    return [os.path.realpath(path) for path in os.environ.get(name, "").split(":") if path]


_folders, _programs = _listed("ATROPOS_FOLDERS"), _listed("ATROPOS_PROGRAMS")
_own = set(os.environ.get("ATROPOS_MODULES", "").split(":"))
_library = os.path.dirname(os.__file__)
_stdlib = [_library, os.path.join(_library, "lib-dynload")]
_here = os.path.dirname(os.path.abspath(__file__))
_site = list(sys.path)
"""What the image put on the path: nothing was put before it yet."""
_installed = [path for path in _site if os.path.realpath(path) not in _listed("PYTHONPATH")]
_last = [each for each in os.environ.get("ATROPOS_PYTHON_LAST", "").split(":") if each]
_packages = [os.path.join(each, "python{}.{}".format(*sys.version_info)) for each in _listed("ATROPOS_PACKAGES")]
_known = {}


def _is_in(path, folders):
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _is_the_agents(path):
    try:
        path = os.path.abspath(path)
    except OSError:  # the working folder is gone
        return True
    if path not in _known:
        real = os.path.realpath(path)
        _known[path] = real == "/" or (_is_in(real, _folders) and not _is_in(real, _programs))
    return _known[path]


def _changed(path):
    """When a file changed; 0: there is none."""
    try:
        return os.stat(path).st_ctime
    except OSError:
        return 0


_began = _changed(os.environ.get("ATROPOS_BEGAN", ""))
"""What is in the agent's folders since then, tests put there."""


def _elsewhere():
    return [each for each in sys.path if not _is_the_agents(each)]


def _importer(*others):
    """The frame of the code that imports, which is not in one of these folders."""
    frame = sys._getframe()  # noqa: SLF001 (importlib doesn't say who asks)
    others = ("<frozen importlib", frame.f_code.co_filename, *others)
    while frame is not None and frame.f_code.co_filename.startswith(others):
        frame = frame.f_back
    return frame


def _installed_code_imports():
    """Whether an import statement of an installed module asks, rather than a function that was given a name."""
    from opcode import opmap

    frame = _importer()
    if frame is None or frame.f_lasti < 0 or frame.f_code.co_code[frame.f_lasti] != opmap["IMPORT_NAME"]:
        return False
    path = frame.f_code.co_filename
    return os.path.isabs(path) and not _is_the_agents(path) and _is_in(path, _installed)


def _asking():
    """The file of the agent's that imports, by whatever way; None: other code does."""
    frame = _importer(os.path.join(_library, "importlib") + os.sep)
    path = "<" if frame is None else frame.f_code.co_filename
    return None if path.startswith("<") or not _is_the_agents(path) else path


def _work_imports():
    """Whether the agent's work asks, and no file that tests put beside it."""
    path = _asking()
    return path is not None and _changed(path) < _began


def _put_there(name, folders):
    """A module of the tests' own in one of these, which comes before a package or library of the agent's beside it."""
    for each in folders:
        module = os.path.join(each, name + ".py")
        if _changed(module) >= _began > _changed(os.path.join(each, name, "__init__.py")):
            return spec_from_file_location(name, module)
    return None


def _is_a_copy(name, origin):
    """Whether an installed module was built from an agent's folder (`pip install .`), whose own copy is the newer."""
    site = os.path.dirname(origin)
    if os.path.basename(origin).startswith("__init__."):
        site = os.path.dirname(site)
    for each in os.listdir(site):
        try:
            with open(os.path.join(site, each, "direct_url.json")) as file:
                source = file.read().partition('"file://')[2].partition('"')[0]
            with open(os.path.join(site, each, "RECORD")) as file:
                if (
                    source
                    and _is_the_agents(source)
                    and any(line.startswith((name + "/", name + ".")) for line in file)
                ):
                    return True
        except OSError:
            pass
    return False


class _ElsewhereFirst:
    """Finds modules where the agent wrote nothing; what is only there, the usual finders look for."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        # Parts of packages come from where the package is (path), built-in modules from no file.
        if path is not None or name in sys.builtin_module_names:
            return None
        if name in _STARTED:
            others = [each for each in _elsewhere() if os.path.abspath(each) != _here]
            spec = PathFinder.find_spec(name, others, target)
            if spec is None:
                raise _NotFound("there is no " + name, name=name)
            return spec
        agents = [each for each in sys.path if _is_the_agents(each)]
        # `python program.py` on a folder of that name would run its __main__.py (runpy).
        if name == "__main__" and agents and agents[0] == sys.path[0] and agents[0].endswith(".py"):
            raise _NotFound("__main__ of a folder in the place of a program", name=name)
        if _work_imports():
            return None
        if name in _own:
            return _put_there(name, agents)
        # A module of the agent's named as one of the library's (random.py) would be run by every tool.
        spec = PathFinder.find_spec(name, _stdlib, target)
        if spec is not None:
            return spec
        if not agents:
            return None
        spec = PathFinder.find_spec(name, _elsewhere(), target)
        if spec is not None and spec.origin is not None:
            shadowed = PathFinder.find_spec(name, agents, target) is not None
            return None if shadowed and _is_a_copy(name, spec.origin) else spec
        if name in getattr(sys, "stdlib_module_names", ()) or _installed_code_imports():
            return _of_others(name, target)
        return _put_there(name, agents)


def _of_others(name, target):
    """What is found by another way than the folders on the path, or in those of them that the image put there."""
    for finder in sys.meta_path:
        if finder not in (_ElsewhereFirst, PathFinder):
            spec = getattr(finder, "find_spec", lambda *_: None)(name, None, target)
            if spec is not None:
                return spec
    spec = PathFinder.find_spec(name, _site + _last, target)
    if spec is None:
        raise _NotFound("No module named " + repr(name), name=name)
    return spec


class _InstalledByTheAgent:
    """Finds packages that the agent installed, for code of its own which finds them nowhere else."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if path is not None or _asking() is None:
            return None
        return PathFinder.find_spec(name, _packages, target)


def _with_packages(find, *context):
    """Distributions on the path, and those that the agent installed where no path is given."""
    for each in find(*context):
        yield each
    for asked in context:
        if _packages and "path" not in vars(asked):
            for each in find(type(asked)(name=asked.name, path=_packages)):
                yield each


def _without_plugins(find):
    """Distributions in the agent's folders name no plugins, unless the image put the folder on the path."""

    def find_distributions(*context):
        for each in _with_packages(find, *context):
            folder = os.path.dirname(str(getattr(each, "_path", "")))
            if folder not in _site and _is_the_agents(folder):
                each.read_text = _no_entry_points(each.read_text)
            yield each

    return staticmethod(find_distributions)


def _no_entry_points(read_text):
    return lambda name: None if name == "entry_points.txt" else read_text(name)


def _with_bytecode(get_code):
    """Bytecode is kept, as everywhere, but beside what the agent left: a link there would lead it over another's.

    Python's own code alone looks at the setting here: what writes files by itself, as pytest does, finds it as it was.
    """

    def get_kept_code(self, fullname):
        folder, setting = os.path.dirname(self.path), sys.dont_write_bytecode
        sys.dont_write_bytecode = _is_in(folder, _packages) or _is_the_agents(folder)
        try:
            return get_code(self, fullname)
        finally:
            sys.dont_write_bytecode = setting

    return get_kept_code


def _start():
    _imp.check_hash_based_pycs = "always"  # the agent's may be marked as not to be compared with their source
    SourceFileLoader.get_code = _with_bytecode(SourceFileLoader.get_code)
    sys.meta_path.insert(0, _ElsewhereFirst)
    if _packages:
        sys.meta_path.append(_InstalledByTheAgent)
    if hasattr(PathFinder, "find_distributions"):
        PathFinder.find_distributions = _without_plugins(  # pyright: ignore[reportAttributeAccessIssue]
            PathFinder.find_distributions
        )
    try:
        spec = _ElsewhereFirst.find_spec("sitecustomize")
    except ImportError:
        pass
    else:
        spec.loader.exec_module(module_from_spec(spec))
    sys.path.extend(_last)


if PathFinder is not None:
    _start()
