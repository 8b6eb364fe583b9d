"""A Dockerfile as a recipe for a slot. What can't be honoured is refused with file, line and cure.

Words, flags and here-documents are read by e2b-dockerfile-utils, a port of BuildKit's parser; the meaning is given
here, as in the Dockerfile reference.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from e2b_dockerfile_utils import (
    DockerfileAst,
    DockerfileHeredoc,
    DockerfileInstruction,
    DockerfileSyntaxError,
    chomp_heredoc_content,
    parse_heredoc,
)

from atropos.errors import ConfigError
from atropos.images.manifests import is_for
from atropos.tasks.format import health, instructions, tars
from atropos.tasks.format.context import Context
from atropos.tasks.format.files import read_text
from atropos.tasks.format.recipe import (
    BuildInputs,
    Copy,
    Download,
    Folder,
    Mount,
    Recipe,
    Run,
    Stage,
    StepSettings,
    copies,
    file_name,
)
from atropos.tasks.format.words import Building, Words

_PROGRAMS = "/.heredocs"
"""Where a here-document lies that is a program; /dev/pipes with BuildKit."""


def parse(
    path: Path,
    context: Path,
    images: BuildInputs,
    arguments: Mapping[str, str] = MappingProxyType({}),
    target: str | None = None,
) -> Recipe:
    """Read a Dockerfile.

    Args:
        path: the file.
        context: the folder that it copies from.
        images: what is known of the images of its FROMs, and what it is built for.
        arguments: values of its ARGs in the place of their defaults.
        target: the stage that is meant, by name or number; None: the last one.

    Raises:
        ConfigError: an instruction that a slot can't honour, or one that can't be read; names file and line.
    """
    try:
        ast = instructions.read(read_text(path, "write it, or name an image"))
    except DockerfileSyntaxError as error:
        message = str(error).partition(": ")[2]
        raise ConfigError(f"{path}:{error.line or 1}: {message}; see the Dockerfile reference") from None
    return _Reader(path, context, ast, images, arguments).read(target)


class _Reader(Words):
    """Reads one Dockerfile, instruction by instruction."""

    def __init__(
        self, path: Path, context: Path, ast: DockerfileAst, images: BuildInputs, arguments: Mapping[str, str]
    ) -> None:
        super().__init__(str(path), ast.escape_token, images.architecture)
        self.path, self.context, self.ast, self.images, self.arguments = path, context, ast, images, arguments
        self.copied: dict[str, int] = {}
        """Images that files are copied from, each with a negative number in place of a stage's."""
        self.stages: list[Building] = []

    def read(self, target: str | None) -> Recipe:
        for instruction in self.ast.instructions:
            self.where = f"{self.path}:{instruction.start_line}: {instruction.name}"
            if instruction.name == "FROM":
                self._from(instruction)
            elif not self.stages:
                if instruction.name != "ARG":
                    raise self._refusal("stands before the first FROM; move it below")
                self._arg(instruction, None)
            else:
                self._instruction(instruction)
        if not self.stages:
            raise ConfigError(f"{self.path}: no FROM; begin with one, or replace the Dockerfile by setup.sh")
        chosen = self._chosen(target)
        chosen.steps += chosen.volumes
        last = chosen.done()
        needed = self._needed(last)
        for each in (chosen, *(self.stages[stage.index] for stage in needed if stage.index >= 0)):
            if each.refused is not None:
                raise each.refused
        return Recipe(last.image, chosen.settings, last.steps, needed, self.path)

    def _chosen(self, target: str | None) -> Building:
        """The stage that is meant."""
        if target is None:
            return self.stages[-1]
        number = int(target) if target.isdecimal() else len(self.stages)
        chosen = self._stage(target) or (self.stages[number] if number < len(self.stages) else None)
        if chosen is None:
            raise ConfigError(f"{self.path}: has no stage {target!r:.80}, which its build is to stop at; name another")
        return chosen

    def _instruction(self, instruction: DockerfileInstruction) -> None:
        getattr(self, f"_{instruction.name.lower()}")(instruction, self.stages[-1])

    def _needed(self, last: Stage) -> tuple[Stage, ...]:
        """The stages that `last` copies from, and those that they copy from."""
        known = {number: Stage(number, image, ()) for image, number in self.copied.items()}
        known |= {stage.index: stage.done() for stage in self.stages}
        stages: dict[int, Stage] = {}
        waiting = [last]
        # As BuildKit has it: stages that nothing leads to are not built.
        while waiting:
            for copy in (copy for step in waiting.pop().steps for copy in copies(step)):
                if copy.stage is not None and copy.stage not in stages:
                    stages[copy.stage] = known[copy.stage]
                    waiting.append(known[copy.stage])
        return tuple(stages[index] for index in sorted(stages))

    # ----------------------------------------------------------------------------------------------- instructions

    def _from(self, instruction: DockerfileInstruction) -> None:
        flags = self._flags(instruction, {"platform": ""})
        platform = self._word(flags["platform"][-1]) if "platform" in flags else ""
        refused = None
        if platform and not is_for(platform, self.images.architecture):
            own = f"linux/{self.images.architecture}"
            refused = self._refusal(f"--platform={platform}: slots are {own}; remove the flag, or set architecture")
        words = [self._word(word) for word in instruction.args]
        if len(words) not in {1, 3} or (len(words) == 3 and words[1].upper() != "AS") or not words[0]:
            raise self._refusal(f"{' '.join(words)}: write FROM IMAGE or FROM IMAGE AS NAME")
        # BuildKit compares names of stages without regard to case.
        name = words[2].lower() if len(words) == 3 else ""
        index = len(self.stages)
        parent = self._stage(words[0])
        if parent is None:
            settings = self.images.settings.get(words[0], StepSettings())
            triggers = settings.onbuild
            # Docker makes a folder of each when a container starts.
            volumes = [Folder(path) for path in settings.volumes]
            # Triggers are for the next build alone, not for those that stand on it.
            settings = replace(settings, onbuild=())
            self.stages.append(Building(index, words[0], settings, name, volumes=volumes, refused=refused))
        else:  # what it is built for is its parent's, whatever the flag says
            triggers = parent.onbuild
            self.stages.append(
                replace(
                    parent,
                    index=index,
                    name=name,
                    steps=list(parent.steps),
                    volumes=list(parent.volumes),
                    # an ARG that an ENV has is the ENV again
                    arguments={n: value for n, value in parent.arguments.items() if n not in parent.settings.env},
                    # Inherited by now: an ENTRYPOINT of this stage drops it.
                    own_cmd=False,
                    onbuild=(),
                )
            )
        for text in triggers:
            for triggered in self._triggered(text):
                self._instruction(triggered)

    def _stage(self, name: str) -> Building | None:
        # The latest of two with one name.
        return next((stage for stage in reversed(self.stages) if stage.name and stage.name == name.lower()), None)

    def _arg(self, instruction: DockerfileInstruction, stage: Building | None) -> None:
        into = self.globals if stage is None else stage.arguments
        for word in instruction.args:
            name, equals, value = word.partition("=")
            if name in self.arguments:
                into[name] = self.arguments[name]
            elif equals:
                into[name] = self._word(value, stage)
            # An ARG before the first FROM is known in a stage only where that declares it again, and then needs no
            # value.
            elif name in self.globals:
                into[name] = self.globals[name]

    def _env(self, instruction: DockerfileInstruction, stage: Building) -> None:
        # The parser gives three words for each: name, value and the sign between them.
        pairs = zip(instruction.args[::3], instruction.args[1::3], strict=True)
        # All words by the environment before the instruction: `ENV a=1 b=$a` has the former `a` (Dockerfile reference).
        added = {self._word(name, stage): self._word(value, stage) for name, value in pairs}
        stage.settings = replace(stage.settings, env={**stage.settings.env, **added})
        stage.arguments = {name: value for name, value in stage.arguments.items() if name not in added}

    def _workdir(self, instruction: DockerfileInstruction, stage: Building) -> None:
        folder = self._word(self._one(instruction), stage)
        path = stage.path(folder)
        stage.settings = replace(stage.settings, workdir=path)
        stage.steps.append(Folder(path, stage.settings.user))

    def _user(self, instruction: DockerfileInstruction, stage: Building) -> None:
        stage.settings = replace(stage.settings, user=self._word(self._one(instruction), stage))

    def _shell(self, instruction: DockerfileInstruction, stage: Building) -> None:
        if not instruction.json or not instruction.args:
            raise self._refusal('needs the JSON form: SHELL ["/bin/bash", "-c"]')
        stage.settings = replace(stage.settings, shell=tuple(instruction.args))

    def _run(self, instruction: DockerfileInstruction, stage: Building) -> None:
        flags = self._flags(instruction, {"mount": "", "network": "", "security": "slots have no privileged mode"})
        network = flags.get("network", ["default"])[-1]
        if network not in {"default", "none"}:
            raise self._refusal(f"--network={network} can't be honoured in a slot: remove it")
        # Build arguments are variables of RUN, and of no container.
        settings = replace(stage.settings, env={**stage.settings.env, **stage.arguments})
        mounts = [mount for text in flags.get("mount", ()) if (mount := self._mount(text, stage)) is not None]
        if instruction.json:
            command = tuple(instruction.args)
        else:
            script = self._script(instruction)
            if self._is_program(instruction):
                name = instruction.heredocs[0].name
                content = Copy((), f"{_PROGRAMS}/", 0o755, files=((name, script),))
                mounts.append(Mount(_PROGRAMS, content))
                command = (f"{_PROGRAMS}/{name}",)
            else:
                command = (*stage.settings.shell, script)
        if not command:
            raise self._refusal("needs a command")
        stage.steps.append(Run(command, settings, tuple(mounts), offline=network == "none"))

    def _script(self, instruction: DockerfileInstruction) -> str:
        """The shell form's text, its here-documents included."""
        text = instruction.args[0] if instruction.args else ""
        if not text:
            raise self._refusal("needs a command")
        documents = instruction.heredocs
        if len(documents) == 1 and parse_heredoc(text) is not None:
            return _content(documents[0])
        # The shell reads here-documents itself, with their ends.
        return "\n".join([text, *(f"{one.content}{one.name}" for one in documents)])

    @staticmethod
    def _is_program(instruction: DockerfileInstruction) -> bool:
        """Whether a line is a here-document alone, run by the program that its first line names; not if indented."""
        alone = len(instruction.heredocs) == 1 and parse_heredoc(instruction.args[0]) is not None
        return alone and instruction.heredocs[0].content.startswith("#!")

    def _mount(self, text: str, stage: Building) -> Mount | None:
        """None: there is nothing to show, as in a build that is given no secrets."""
        options: dict[str, str] = {}
        for part in text.split(","):
            key, _, value = part.partition("=")
            options[key.strip()] = self._word(value, stage)
        kind = options.get("type", "bind")
        target = options.get("target") or options.get("dst") or options.get("destination")
        if kind in {"secret", "ssh"} and options.get("required", "false").lower() in {"false", "0"}:
            return None
        if kind not in {"bind", "cache", "tmpfs"} or target is None:
            raise self._refusal(f"--mount={text} can't be honoured in a slot: use COPY, or type=cache, tmpfs or bind")
        target = stage.path(target)
        if target == "/":
            raise self._refusal(f"--mount={text} can't be honoured in a slot: name a folder below /")
        if kind == "bind" or "from" in options:
            source = self._inside(options.get("source") or options.get("src") or ".")
            return Mount(target, Copy((source,), target, stage=self._from_stage(options.get("from"))))
        try:
            mode = None if kind == "tmpfs" else int(options.get("mode") or "755", 8)
            owner = int(options.get("uid") or 0), int(options.get("gid") or 0)
        except ValueError:
            raise self._refusal(f"--mount={text}: mode, uid and gid are numbers") from None
        cache = (options.get("id") or target) if kind == "cache" else ""
        if cache and not options.keys().isdisjoint({"mode", "uid", "gid"}):  # with BuildKit another one
            cache += f" {mode or 0:o} {owner[0]}:{owner[1]}"
        return Mount(target, mode=mode, owner=owner, cache=cache)

    def _copy(self, instruction: DockerfileInstruction, stage: Building) -> None:
        known: dict[str, str] = dict.fromkeys(("from", "chown", "chmod", "link", "exclude", "parents"), "")
        flags = self._flags(instruction, known)
        source = self._word(flags["from"][-1], stage) if "from" in flags else None
        stage.steps.append(self._copied(instruction, stage, flags, self._from_stage(source)))

    def _from_stage(self, name: str | None) -> int | None:
        if name is None:
            return None
        stage = self._stage(name)
        index = stage.index if stage is not None else int(name) if name.isdecimal() else None
        if index is None:
            # No stage: an image, which is like a stage without steps.
            return self.copied.setdefault(name, -1 - len(self.copied))
        # Neither itself nor a later one, so that no circle can come about.
        if index >= len(self.stages) - 1:
            raise self._refusal(f"--from={name}: is no earlier stage; copy from one above")
        return index

    def _copied(
        self, instruction: DockerfileInstruction, stage: Building, flags: dict[str, list[str]], source: int | None
    ) -> Copy:
        words = [self._word(word, stage) for word in instruction.args]
        if len(words) < 2:
            raise self._refusal(f"{' '.join(words)}: write a source and a target")
        mode = self._mode(flags, stage)
        owner = self._word(flags["chown"][-1], stage) if "chown" in flags else None
        documents = {f"<<{one.name}": one for one in instruction.heredocs}
        files: list[tuple[str, str]] = []
        sources: list[str] = []
        for raw, word in zip(instruction.args[:-1], words[:-1], strict=True):
            document = documents.get("<<" + raw.lstrip("<-").strip("'\"")) if raw.startswith("<<") else None
            if document is not None:
                files.append((document.name, self._filled(document, stage)))
                continue
            sources.append(self._inside(word))
        destination = words[-1]
        if files and source is not None:
            raise self._refusal("--from takes no here-document: give that a COPY of its own")
        target = stage.path(destination)
        parents = self._switch(flags, "parents", default=False)
        if parents and source is not None and any("**" in each for each in sources):
            raise self._refusal("--parents of a stage takes no ** here: name the folders, or use *")
        # By its name a folder, even where nothing is there yet.
        if destination.endswith(("/", "/.")) or destination == "." or len(words) > 2 or parents:
            target = target.rstrip("/") + "/"
        return Copy(
            tuple(sources),
            target,
            mode,
            owner=owner,
            stage=source,
            files=tuple(files),
            exclude=self._exclude(flags),
            parents=parents,
        )

    def _filled(self, document: DockerfileHeredoc, stage: Building) -> str:
        text = _content(document)
        if not document.expand:
            return text
        # as BuildKit has it: a backslash is gone, whatever it stands before and whatever `# escape` says
        return self._word(text, stage, escape="\\", skip_process_quotes=True)

    def _add(self, instruction: DockerfileInstruction, stage: Building) -> None:
        known = dict.fromkeys(("chown", "chmod", "link", "exclude", "checksum", "unpack"), "")
        flags = self._flags(instruction, {**known, "keep-git-dir": "clone with RUN"})
        sources = [self._word(word, stage) for word in instruction.args[:-1]]
        # BuildKit takes an address that ends in `.git` for a repository.
        if any(re.match(r"https?://(?!\S*\.git(#|$))", word) for word in sources):
            self._download(instruction, stage, flags, sources)
            return
        if any(re.match(r"[a-z][a-z0-9+.-]*://|git@", word) for word in sources):
            raise self._refusal("of a repository can't be honoured in a slot: clone it with RUN")
        if "checksum" in flags:
            raise self._refusal("--checksum: only a download has one; remove it")
        copy = self._copied(instruction, stage, flags, None)
        context = Context.of(self.context, self.path)
        named = [name for source in copy.sources for name in context.matching(source, copy.exclude)]
        unpacks = self._switch(flags, "unpack", default=True)
        zstd = next((name for name in named if unpacks and tars.is_zstd(self.context / name)), None)
        if zstd is not None and shutil.which("zstd") is None:
            raise self._refusal(f"{zstd}: is packed with zstd, a program that is missing here; install it, or use gzip")
        archives = [name for name in named if unpacks and tars.is_archive(self.context / name)]
        rest = tuple(name for name in named if name not in archives)
        if archives:
            stage.steps.append(replace(copy, sources=tuple(archives), files=(), unpack=True))
        if rest or copy.files:
            stage.steps.append(replace(copy, sources=rest))

    def _download(
        self, instruction: DockerfileInstruction, stage: Building, flags: dict[str, list[str]], sources: list[str]
    ) -> None:
        unpack = self._switch(flags, "unpack", default=False)
        if len(sources) != 1:
            raise self._refusal("of several sources with an address among them: give each its own ADD")
        address, target = sources[0], self._word(instruction.args[-1], stage)
        try:
            name = file_name(address)
        except ValueError as error:
            raise self._refusal(f"{address}: {error}") from None
        if target.endswith("/") and not unpack:
            if not name:
                raise self._refusal(f"{address} ends in no name for the file; name it in the target")
            target += name
        checksum = self._word(flags["checksum"][-1], stage) if "checksum" in flags else None
        if checksum is not None and not re.fullmatch(r"sha256:[0-9a-f]{64}", checksum):
            raise self._refusal(f"--checksum={checksum}: write sha256: and 64 digits")
        mode = self._mode(flags, stage)
        if isinstance(mode, str):
            raise self._refusal(f"--chmod={mode}: a download has no mode to change; write digits")
        owner = self._word(flags["chown"][-1], stage) if "chown" in flags else None
        path = stage.path(target) + ("/" if target.endswith("/") else "")
        # Docker gives a download the mode 0600.
        stage.steps.append(Download(address, path, checksum, 0o600 if mode is None else mode, owner, unpack))

    def _volume(self, instruction: DockerfileInstruction, stage: Building) -> None:
        stage.volumes += [Folder(self._word(word, stage)) for word in instruction.args]

    def _for_containers(self, instruction: DockerfileInstruction, stage: Building) -> None:
        """What only a container's start reads: a slot is entered by commands, so it is checked and has no effect."""
        if instruction.name in {"STOPSIGNAL", "MAINTAINER"}:
            self._one(instruction)
        if instruction.name in {"STOPSIGNAL", "EXPOSE", "LABEL"}:
            for word in instruction.args:
                self._word(word, stage)

    _stopsignal = _expose = _label = _maintainer = _for_containers

    def _healthcheck(self, instruction: DockerfileInstruction, stage: Building) -> None:
        known: dict[str, str] = dict.fromkeys((*(name.replace("_", "-") for name in health.TIMES), "retries"), "")
        options = {name.replace("-", "_"): values[-1] for name, values in self._flags(instruction, known).items()}
        kind, *words = instruction.args or [""]
        kind = kind.upper()
        if kind == "CMD" and words:
            kind = "CMD" if instruction.json else "CMD-SHELL"
        elif (kind, *words) != health.NONE:
            raise self._refusal("needs CMD and a command, or NONE")
        described = health.described((kind, *words), options, f"{self.where} --")
        stage.settings = replace(stage.settings, healthcheck=described)

    def _entrypoint(self, instruction: DockerfileInstruction, stage: Building) -> None:
        # As Docker has it: an ENTRYPOINT drops the CMD of the image that it stands on, which belonged to another one.
        cmd = stage.settings.cmd if stage.own_cmd else ()
        stage.settings = replace(stage.settings, entrypoint=self._started(instruction, stage), cmd=cmd)

    def _cmd(self, instruction: DockerfileInstruction, stage: Building) -> None:
        stage.settings, stage.own_cmd = replace(stage.settings, cmd=self._started(instruction, stage)), True

    @staticmethod
    def _started(instruction: DockerfileInstruction, stage: Building) -> tuple[str, ...]:
        words = tuple(instruction.args)
        return words if instruction.json or not words else (*stage.settings.shell, words[0])

    def _onbuild(self, instruction: DockerfileInstruction, stage: Building) -> None:
        text = instructions.trigger(instruction)
        self._triggered(text)
        stage.onbuild = (*stage.onbuild, text)

    def _triggered(self, text: str) -> list[DockerfileInstruction]:
        """What an ONBUILD holds for the stages that start from its own."""
        try:
            triggered = instructions.read(text).instructions
        except DockerfileSyntaxError as error:
            raise self._refusal(f"ONBUILD {text}: {error}") from None
        if {one.name for one in triggered} & {"ONBUILD", "FROM", "MAINTAINER"}:
            raise self._refusal(f"ONBUILD {text}: is no instruction for a later build; remove it")
        return triggered


def _content(document: DockerfileHeredoc) -> str:
    return chomp_heredoc_content(document.content) if document.chomp else document.content
