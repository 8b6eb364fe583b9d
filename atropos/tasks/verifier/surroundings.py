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
from atropos.slots.slot.profile import PLAIN, WORKSPACE, Profile
from atropos.tasks.builder.transfer import exec_plain
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.format.recipe import PATH
from atropos.tasks.format.task import Task
from atropos.tasks.verifier.elsewhere import PACKAGES
from atropos.tasks.verifier.home import home_of, is_tool, move_in
from atropos.tasks.verifier.repositories import named_programs, take_out
from atropos.tasks.verifier.texts import TaskTexts, paths_in, without_paths
from atropos.wire import VIEW_HOME, ViewInfo

LIBRARIES = (
    "/usr/local/lib:/lib/x86_64-linux-gnu:/usr/lib/x86_64-linux-gnu:/lib/aarch64-linux-gnu:/usr/lib/aarch64-linux-gnu:"
    "/lib64:/usr/lib64:/lib:/usr/lib"
)
"""Where a loader looks after LD_LIBRARY_PATH."""
_SEARCHED = {"PATH": PATH, "LD_LIBRARY_PATH": LIBRARIES, "PYTHONPATH": "", "CLASSPATH": "", "NODE_PATH": ""}
"""Lists of folders in which the agent's can be the last; and what comes before these anyway."""
_LOADS = re.compile(
    r"(?:PYTHON|PYTEST|PERL|RUBY|RUST|OCAML)\w*"
    r"|(?:LD|DYLD|PIPX?|UV|PYENV|COVERAGE|NUMBA|TRITON|TORCHINDUCTOR|NODE|TS_NODE|NPM|npm|YARN|PNPM|DENO|BUN|RBENV|GEM"
    r"|BUNDLE|_?JAVA|JDK|MAVEN|GRADLE|SBT|ANT|GROOVY|KOTLIN|SCALA|CARGO|GIT|XDG|LUA|R|RENV|JULIA|PHP|DOTNET|OPENSSL|GCC"
    r"|CMAKE|PKG_CONFIG|VIRTUAL|CONDA|ERL|MIX|HEX|GHC|GUILE|OCTAVE|MYSQL)_\w*"
    r"|BASH_ENV|ENV|SHELL|FPATH|GO(?:BIN|FLAGS|ENV|ROOT)|GCONV_PATH|LOCPATH|MAKEFILES|MAKEFLAGS|C(?:PLUS)?_INCLUDE_PATH"
    r"|CPATH|COMPILER_PATH|LIBRARY_PATH|CC|CXX|AR|TMPDIR|TMP|TEMP|ZDOTDIR|WGETRC|CURL_HOME|INPUTRC|PSQLRC|GEMRC|PHPRC"
    r"|PG(?:SERVICEFILE|PASSFILE|SYSCONFDIR)|LESS(?:OPEN|CLOSE|KEY\w*)?|EDITOR|PAGER|TERMINFO|GNUPGHOME|ACLOCAL_PATH"
    r"|TCLLIBPATH|EMACSLOADPATH|IPYTHONDIR|MPLCONFIGDIR|MYPYPATH|HOME|CDPATH"
)
"""Variables by which programs find code and settings, beside those lists."""
_SYSTEM = ("/usr/", "/bin", "/sbin", "/lib")
_FILE = re.compile(
    r"BASH_ENV|ENV|MAKEFILES|PYTHON(?:STARTUP|HOME|USERBASE)|\w*RC(?:FILE)?|CURL_HOME"
    r"|(?!NODE_CONFIG\Z)\w+_CONF(?:IG(?:_FILE|_GLOBAL|_SYSTEM)?)?|\w+_(?:user|global|USER|GLOBAL)(?:config|CONFIG)"
)
"""Those of which the whole value is a path, and a relative one is looked for in the working folder."""
_OPTION = re.compile(
    r"NODE_OPTIONS=.*?(?:--require|-r|--import|--(?:experimental-)?loader)[= ]\s*(?!/)"
    r"|(?:PERL5|RUBY)OPT=.*?-I\s*(?![/\s])|PYTEST_ADDOPTS=(?:.*\s)?-(?:p\s*(?!no:|\s)|c\s*(?![/\s]))\w"
    r"|_?J\w*_OPTIONS=.*?-(?:javaagent:|agentpath:|cp\s|classpath\s)\s*(?!/)",
    re.DOTALL,
)
"""Those with an option for what is looked for there."""
_PATH_IN_VALUE = re.compile(r"(?:(?<![\w./-])|(?<=-[A-Za-z]))\.{0,2}/[^\s:;,=\"']*")
FOLDERS = "ATROPOS_FOLDERS"
"""The variable with the agent's folders."""
BEGAN = "/logs"
"""What changes last before a verifier's programs start, and seldom later: newer files beside the agent's are theirs."""
_SYMLINKS = "core.symlinks"
_GIT = {
    "core.hooksPath": ("/dev/null", r"\bhooks?\b"),
    "core.fsmonitor": ("false", "fsmonitor"),
    _SYMLINKS: ("false", r"sym(bolic )?link|\bln -\w*s|readlink"),
}
"""Settings by which git runs no program of the agent's and makes no links, each unless this is spoken of."""
_MODULE, _OWN_MODULE = re.compile(r"\b(\w{1,64})(?:\.py\b|/)"), re.compile(r"\b(\w+)\.py\b|/(\w+)/")
_ADDRESS = re.compile(r"\b\w{1,20}://\S+")
MAX_MODULES = 1000
"""Most module names passed to a verifier's programs."""
MAX_PROGRAM_FOLDERS = 64
"""Most folders of programs that a view is asked for."""
_RUNS_GIT = re.compile(r"\bgit\b")
_CLONES = re.compile(r"\bgit\b[^\n;|&]{,300}\b(?:clone(?:_from)?|submodule)\b")
_PATCHES = re.compile(r"\bgit\b[^\n;|&]{,300}\b(?:apply|am)\b")
_INSTALLS = re.compile(r"\b(?:npm|pnpm|yarn)\s+(?:-\S+\s+){,20}(?:ci|i|install|add)\b")


@dataclass(frozen=True)
class Wishes:
    """What the texts of a task or a prompt show to be wanted of the agent, so that nothing keeps tests from it.

    Attributes:
        git: settings of git that keep tests from running the agent's programs, and stay out.
        modules: modules that are the agent's to write, also where others of that name are installed.
        installs: whether tests install npm's packages.
        repositories: a pattern of settings that name programs, for repositories; empty where tests run no git.
        places: paths that tests name, and may write to.
        links: whether links are spoken of.
        clones: whether tests clone repositories.
    """

    git: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()
    installs: bool = False
    repositories: str = ""
    places: tuple[str, ...] = ()
    links: bool = False
    clones: bool = False

    @classmethod
    def of(cls, texts: TaskTexts, workdir: str = WORKSPACE) -> Wishes:
        """Those that texts show; `workdir` is where the agent's modules are."""
        spoken = frozenset(key for key, (_, word) in _GIT.items() if re.search(word, texts.whole))
        patches = any(_PATCHES.search(test) for test in texts.tests)
        return cls(
            spoken if patches else spoken | {_SYMLINKS},
            tuple(_modules(texts, workdir)),
            any(_INSTALLS.search(test) for test in texts.tests),
            named_programs(texts.whole) if any(_RUNS_GIT.search(test) for test in texts.tests) else "",
            tuple({posixpath.normpath(path) for test in texts.tests for path in paths_in(test)}),
            _SYMLINKS in spoken,
            any(_CLONES.search(test) for test in texts.tests),
        )

    @property
    def refuses_links(self) -> bool:
        """Whether git makes no links."""
        return _SYMLINKS not in self.git

    def where_links_lead_out(self) -> Wishes:
        """Those beside a repository that has links which lead out of it: git makes none, unless they are spoken of."""
        return self if self.links else replace(self, git=self.git - {_SYMLINKS})


def _modules(texts: TaskTexts, workdir: str) -> list[str]:
    """Names of Python files and folders in texts; standard modules only if it can't mean a choice, as `json/yaml`.

    What tests have elsewhere, or name in an address, is none of the agent's.
    """
    inside = [without_paths(text, workdir) for text in texts.tests]
    text = _ADDRESS.sub(" ", "\n".join([texts.asked, *inside]))
    named = set(_MODULE.findall(text)) - sys.stdlib_module_names
    own = {name for names in _OWN_MODULE.findall(text) for name in names} & sys.stdlib_module_names
    return sorted(name for name in named | own if name.isidentifier())[:MAX_MODULES]


@dataclass(frozen=True)
class Surroundings:
    """Where tests run, as far as the agent has been there.

    Attributes:
        folders: what the agent wrote, absolute.
        programs: folders in these that are as the image has them.
        home: the one in them, in whose place is `VIEW_HOME`, as the image has it.
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
        # A relative path is looked for in the working folder, which is the agent's.
        return not path.startswith("/") or (_below(path, self.folders) and not _below(path, self.programs))

    def leads(self, name: str, value: str) -> bool:
        """Whether a variable has programs load what is the agent's."""
        if name in _SEARCHED:
            # An empty entry of such a list means the working folder (as in PATH, environ(7)).
            return any(self.holds(entry or ".") for entry in value.split(":"))
        if _LOADS.fullmatch(name) is None:
            return False
        if _FILE.fullmatch(name) is not None and value and not value.isdigit() and self.holds(value):
            return True
        return _OPTION.match(f"{name}={value}") is not None or any(self.holds(path) for path in _paths(value))

    def variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """An image's variables for the tests, without those that lead to the agent's work, or with its folders last."""
        result = {name: value for name, value in env.items() if not self.leads(name, value)}
        for name, before in _SEARCHED.items():
            if name not in env or name in result:
                continue
            # Empty ones go: they would search the agent's folder in their place in the list.
            entries = [entry for entry in env[name].split(":") if entry]
            first = [place for entry in entries if (place := self._of_image(entry)) is not None]
            last = [entry for entry in entries if self.holds(entry)]
            if name == "PYTHONPATH":  # whose entries come before Python's own modules, however late they are in it
                result["ATROPOS_PYTHON_LAST"] = ":".join(last)
                last = []
            elif last:
                first += [entry for entry in before.split(":") if entry and entry not in first]
            if first or last:
                result[name] = ":".join([*first, *last])
        return result

    def _of_image(self, folder: str) -> str | None:
        """Where the tests find a folder as the image has it; None: only as the agent left it."""
        if not self.holds(folder):
            return folder
        path = posixpath.normpath(folder)
        if self.home is None or not path.startswith(f"{self.home}/"):
            return None
        inside = path.removeprefix(f"{self.home}/")
        return f"{VIEW_HOME}/{inside}" if is_tool(inside.split("/")[0]) else None


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


def environment(task: Task, profile: Profile, surroundings: Surroundings) -> dict[str, str]:
    """The variables that a task's tests start with."""
    image, declared = image_variables(task), {name: profile.env[name] for name in task.config.verifier.env}
    env = {"PATH": PATH, **profile.identity}
    if not surroundings.folders:
        return {**env, **image, **declared}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # but for `verifier_site`, which says where it is kept
    if profile.user is None:  # settings that the agent left in a home must not run here
        env["PYTHONNOUSERSITE"] = "1"
    if surroundings.wishes.installs:
        env["npm_config_ignore_scripts"] = "true"
    # The image's own settings win over ours where they don't lead to the agent.
    env |= {**_defaults(surroundings), **surroundings.variables(image)}
    if surroundings.home is not None:
        env["HOME"] = VIEW_HOME
    # The author's variables last: they are meant, whatever they lead to.
    return _with_modules({**env, **declared})


async def hook_profile(slot: Slot, shown: ViewInfo, prompt: str) -> Profile:
    """A profile for the hooks that verify in a view, of what the agent was asked for.

    Raises:
        VerifierFailed: the agent left its folders in such a state that this can't be done.
    """
    profile, slot.profile = slot.profile, PLAIN
    wishes = Wishes.of(TaskTexts(prompt, ()))
    if await take_out(slot, shown.folders, named_programs(prompt), links=not wishes.links, clones=True):
        wishes = wishes.where_links_lead_out()
    # Its time is the moment from which files beside the agent's are the tests' (`verifier_site`).
    await exec_plain(slot, f"mkdir -p {BEGAN} && touch {BEGAN}")
    surroundings = Surroundings(shown.folders, shown.programs, wishes=wishes)
    home = home_of(profile)
    if surroundings.holds(home):
        # Settings in a home (.bashrc, .gitconfig …) run with every program that reads them.
        surroundings, profile = replace(surroundings, home=home), await move_in(slot, profile)
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


async def with_links(slot: Slot, env: Mapping[str, str], surroundings: Surroundings) -> Surroundings:
    """The same with those paths of an image's variables that lead into the agent's folders by links.

    Raises:
        VerifierFailed: where they lead can't be found out.
    """
    named = {path for name, value in env.items() for path in _named(name, value)}
    # Programs of the system are the image's, links and all: no question is needed for them.
    asked = [path for path in sorted(named) if path.startswith("/") and not path.startswith(_SYSTEM)]
    if not surroundings.folders or not asked:
        return surroundings
    script = "import os, sys; print(*map(os.path.realpath, sys.argv[1:]), sep='\\0', end='')"
    done = await exec_plain(slot, (*SLOT_PYTHON, "-c", script, *asked))
    if done.exit_code != 0:
        raise VerifierFailed(f"the image's variables can't be looked at: {done.output[-300:].strip()}")
    pairs = zip(asked, done.output.split("\0"), strict=False)
    return replace(
        surroundings, folders=(*surroundings.folders, *(path for path, end in pairs if surroundings.holds(end)))
    )


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


def _defaults(surroundings: Surroundings) -> dict[str, str]:
    """Variables that keep usual programs from running what lies in the agent's folders."""
    return {
        **git_settings(surroundings.wishes),
        FOLDERS: ":".join(surroundings.folders),
        "ATROPOS_BEGAN": BEGAN,
        "ATROPOS_PROGRAMS": ":".join(surroundings.programs),
        "ATROPOS_MODULES": ":".join(surroundings.wishes.modules),
        "ATROPOS_PACKAGES": PACKAGES if PACKAGES in surroundings.folders else "",
    }


def git_settings(wishes: Wishes) -> dict[str, str]:
    """Variables by which git runs no program of the agent's."""
    settings = [key for key in _GIT if key not in wishes.git]
    env = {f"GIT_CONFIG_KEY_{number}": key for number, key in enumerate(settings)}
    env |= {f"GIT_CONFIG_VALUE_{number}": _GIT[key][0] for number, key in enumerate(settings)}
    return {**env, "GIT_CONFIG_COUNT": str(len(settings))}


def _named(name: str, value: str) -> Iterator[str]:
    """Paths that a variable has programs look at."""
    return _paths(value) if name in _SEARCHED or _LOADS.fullmatch(name) else iter(())


def _paths(value: str) -> Iterator[str]:
    """Paths in a variable's value, also right after a flag: absolute ones, and those that start with dots."""
    return (match[0] for match in _PATH_IN_VALUE.finditer(value))


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)
