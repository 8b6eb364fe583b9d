"""What a task's tests start with beside the agent's work: variables and a home by which none of it is run.

An image's variables may lead into folders that the agent wrote in. Programs look there for other programs, libraries,
modules and settings: so the tests search the agent's folders last, and don't get variables that name one of its files.
What `[verifier.env]` of a task sets is what its author wants, and stays.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from atropos.slot_python import SLOT_PYTHON, VERIFIER_PYTHON
from atropos.slots import Slot
from atropos.slots.slot.profile import PLAIN, Profile
from atropos.tasks.builder.transfer import exec_plain
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.format.recipe import PATH
from atropos.tasks.format.task import Task
from atropos.tasks.verifier.elsewhere import PACKAGES
from atropos.tasks.verifier.repositories import named_programs
from atropos.tasks.verifier.texts import TaskTexts, paths_in
from atropos.wire import ViewInfo

LIBRARIES = (
    "/usr/local/lib:/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu:/lib/aarch64-linux-gnu:/usr/lib/aarch64-linux-gnu:"
    "/lib64:/usr/lib64:/lib:/usr/lib"
)
"""Where a loader looks after LD_LIBRARY_PATH."""
_SEARCHED = {"PATH": PATH, "LD_LIBRARY_PATH": LIBRARIES, "PYTHONPATH": "", "CLASSPATH": "", "NODE_PATH": ""}
"""Lists of folders in which the agent's can be the last; and what comes before these anyway."""
_LOADS = re.compile(
    r"(?:LD|DYLD|PYTHON|PYTEST|PIP|UV|NODE|NPM|npm|YARN|PNPM|PERL|RUBY|GEM|BUNDLE|JAVA|_JAVA|JDK|MAVEN|GRADLE|CARGO"
    r"|RUST|GIT|XDG|LUA|R|JULIA|PHP|DOTNET|OPENSSL|SSL|GCONV|GCC|CMAKE|PKG_CONFIG|VIRTUAL|CONDA|CURL|ERL|OCAML|GHC|GUILE|PG"
    r"|MYSQL|LESS)[A-Z\d]*(?:_\w*)?"
    r"|BASH_ENV|ENV|SHELL|GO(?:BIN|FLAGS|ENV|ROOT)|LOCPATH|MAKEFILES|MAKEFLAGS|C(?:PLUS)?_INCLUDE_PATH|CPATH"
    r"|LIBRARY_PATH|CC|CXX|AR|TMPDIR|TMP|TEMP|ZDOTDIR|WGETRC|INPUTRC|PSQLRC|EDITOR|PAGER|TERMINFO|GNUPGHOME|ACLOCAL_PATH"
    r"|TCLLIBPATH|HOME|CDPATH"
)
"""Variables by which programs find code and settings, beside those lists."""
_SYSTEM = ("/usr/", "/bin", "/sbin", "/lib")
_SCRIPTS = {"BASH_ENV", "ENV"}
_PATH_IN_VALUE = re.compile(r"(?:(?<![\w./-])|(?<=-[A-Za-z]))\.{0,2}/[^\s:;,=\"']*")
_GIT = {"core.hooksPath": ("/dev/null", r"\bhooks?\b"), "core.fsmonitor": ("false", "fsmonitor")}
"""Settings by which git runs no program of the agent's, each unless this is spoken of."""
_MODULE, _OWN_MODULE = re.compile(r"\b(\w{1,64})(?:\.py\b|/)"), re.compile(r"\b(\w+)\.py\b|/(\w+)/")
MAX_MODULES = 1000
"""Most module names passed to a verifier's programs."""
MAX_PROGRAM_FOLDERS = 64
"""Most folders of programs that a view is asked for."""
_RUNS_GIT = re.compile(r"\bgit\b")
_INSTALLS = re.compile(r"\b(?:npm|pnpm|yarn)\s+(?:-\S+\s+)*(?:ci|i|install|add)\b")


@dataclass(frozen=True)
class Wishes:
    """What the texts of a task or a prompt show to be wanted of the agent, so that nothing keeps tests from it.

    Attributes:
        git: settings of git that keep tests from running the agent's programs, and stay out.
        modules: modules that are the agent's to write, also where others of that name are installed.
        installs: whether tests install npm's packages.
        repositories: a pattern of settings that name programs, for repositories; empty where tests run no git.
        places: paths that tests name, and may write to.
    """

    git: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    installs: bool = False
    repositories: str = ""
    places: tuple[str, ...] = ()

    @classmethod
    def of(cls, texts: TaskTexts) -> Wishes:
        """Those that texts show."""
        return cls(
            frozenset(key for key, (_, word) in _GIT.items() if re.search(word, texts.whole)),
            tuple(_modules(texts.whole)),
            any(_INSTALLS.search(test) for test in texts.tests),
            named_programs(texts.whole) if any(_RUNS_GIT.search(test) for test in texts.tests) else "",
            tuple({posixpath.normpath(path) for test in texts.tests for path in paths_in(test)}),
        )


def _modules(text: str) -> list[str]:
    """Names of Python files and folders in a text; standard modules only if it can't mean a choice, as `json/yaml`."""
    named = set(_MODULE.findall(text)) - sys.stdlib_module_names
    own = {name for names in _OWN_MODULE.findall(text) for name in names} & sys.stdlib_module_names
    return sorted(name for name in named | own if name.isidentifier())[:MAX_MODULES]


@dataclass(frozen=True)
class Surroundings:
    """Where tests run, as far as the agent has been there.

    Attributes:
        folders: what the agent wrote, absolute.
        programs: folders in these that are as the image has them.
        home: in the place of a home in them.
        wishes: what is wanted of it.
        company: whether programs of its are alive there, and reach what the tests write.
    """

    folders: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    home: str | None = None
    wishes: Wishes = Wishes()
    company: bool = False

    def holds(self, path: str) -> bool:
        """Whether what is at a path may be the agent's; a relative one is."""
        path = posixpath.normpath(path)
        return not path.startswith("/") or (_below(path, self.folders) and not _below(path, self.programs))

    def leads(self, name: str, value: str) -> bool:
        """Whether a variable has programs load what is the agent's."""
        if name in _SEARCHED:
            return any(self.holds(entry or ".") for entry in value.split(":"))
        if _LOADS.fullmatch(name) is None:
            return False
        if name in _SCRIPTS and self.holds(value):
            return True
        return any(self.holds(path) for path in _paths(value))

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """An image's variables for the tests, without those that lead to the agent's work, or with its folders last."""
        result = {name: value for name, value in env.items() if not self.leads(name, value)}
        for name, before in _SEARCHED.items():
            if name not in env or name in result:
                continue
            entries = [entry for entry in env[name].split(":") if entry]
            first = [entry for entry in entries if not self.holds(entry)]
            last = [entry for entry in entries if self.holds(entry)]
            if name == "PYTHONPATH":  # whose entries come before Python's own modules, however late they are in it
                result["ATROPOS_PYTHON_LAST"] = ":".join(last)
                last = []
            elif last:
                first += [entry for entry in before.split(":") if entry and entry not in first]
            if first or last:
                result[name] = ":".join([*first, *last])
        return result


def program_folders(env: Mapping[str, str]) -> tuple[str, ...]:
    """Folders that an image's variables name, with those above them: some may be of programs, as a venv."""
    folders: dict[str, None] = {}
    for name, value in env.items():
        for path in _named(name, value):
            at = posixpath.normpath(path)
            while at.strip("/"):
                folders[at] = None
                at = posixpath.dirname(at)
    return tuple(sorted(folders))[:MAX_PROGRAM_FOLDERS]


def environment(task: Task, profile: Profile, found: Surroundings) -> dict[str, str]:
    """The variables that a task's tests start with."""
    image, declared = image_variables(task), {name: profile.env[name] for name in task.config.verifier.env}
    env = {
        "PATH": PATH,
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_NOSYSTEM": "1",
        **profile.identity,
    }
    if not found.folders:
        return {**env, **image, **declared}
    if profile.user is None:  # settings that the agent left in a home must not run here
        env["PYTHONNOUSERSITE"] = "1"
    if found.wishes.installs:
        env["npm_config_ignore_scripts"] = "true"
    env |= {**_defaults(found), **found.variables(image)}
    if found.home is not None:
        env["HOME"] = found.home
    return _with_modules({**env, **declared})


async def hook_profile(slot: Slot, shown: ViewInfo, prompt: str) -> Profile:
    """A profile for the hooks that verify in a view, of what the agent was asked for."""
    profile, slot.profile = slot.profile, PLAIN
    surroundings = Surroundings(shown.folders, shown.programs, wishes=Wishes.of(TaskTexts(prompt, [])))
    surroundings = await with_links(slot, profile.env, surroundings)
    env = {"PYTHONDONTWRITEBYTECODE": "1", **_defaults(surroundings), **surroundings.variables(profile.env)}
    return replace(profile, env=_with_modules(env))


def _with_modules(env: Mapping[str, str]) -> dict[str, str]:
    """Variables with `verifier_site` as the first that Python finds."""
    return {**env, "PYTHONPATH": ":".join(filter(None, [VERIFIER_PYTHON, env.get("PYTHONPATH")]))}


def image_variables(task: Task) -> dict[str, str]:
    """The variables of a task's machine, without those that its author sets for the tests."""
    declared = task.config.verifier.env
    return {name: value for name, value in task.verifier_settings.env.items() if name not in declared}


async def with_links(slot: Slot, env: Mapping[str, str], found: Surroundings) -> Surroundings:
    """The same with those paths of an image's variables that lead into the agent's folders by links.

    Raises:
        VerifierFailed: where they lead can't be found out.
    """
    named = {path for name, value in env.items() for path in _named(name, value)}
    asked = [path for path in sorted(named) if path.startswith("/") and not path.startswith(_SYSTEM)]
    if not found.folders or not asked:
        return found
    script = "import os, sys; print(*map(os.path.realpath, sys.argv[1:]), sep='\\0', end='')"
    done = await exec_plain(slot, (*SLOT_PYTHON, "-c", script, *asked))
    if done.exit_code != 0:
        raise VerifierFailed(f"the image's variables can't be looked at: {done.output[-300:].strip()}")
    pairs = zip(asked, done.output.split("\0"), strict=False)
    return replace(found, folders=(*found.folders, *(path for path, end in pairs if found.holds(end))))


def notes(task: Task) -> list[str]:
    """Which of an image's variables tests beside WORKDIR get otherwise, or not at all."""
    surroundings = Surroundings((task.recipe.workdir,))
    names = [
        name
        for name, value in image_variables(task).items()
        if task.recipe.workdir != "/" and surroundings.leads(name, value)
    ]
    return [
        f"{name} of the image leads into the agent's folders: tests search these last, or don't get it; [verifier.env] "
        "sets it"
        for name in sorted(names)
    ]


def _defaults(found: Surroundings) -> dict[str, str]:
    """Variables that keep usual programs from running what lies in the agent's folders."""
    settings = [key for key in _GIT if key not in found.wishes.git]
    env = {f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(settings)}
    env |= {f"GIT_CONFIG_VALUE_{number}": _GIT[key][0] for number, key in enumerate(settings)}
    return {
        **env,
        "GIT_CONFIG_COUNT": str(len(settings)),
        "ATROPOS_FOLDERS": ":".join(found.folders),
        "ATROPOS_PROGRAMS": ":".join(found.programs),
        "ATROPOS_MODULES": ":".join(found.wishes.modules),
        "ATROPOS_PACKAGES": PACKAGES if PACKAGES in found.folders else "",
    }


def _named(name: str, value: str) -> Iterator[str]:
    """Paths that a variable has programs look at."""
    return _paths(value) if name in _SEARCHED or _LOADS.fullmatch(name) else iter(())


def _paths(value: str) -> Iterator[str]:
    """Paths in a variable's value, also right after a flag: absolute ones, and those that start with dots."""
    return (match[0] for match in _PATH_IN_VALUE.finditer(value))


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)
