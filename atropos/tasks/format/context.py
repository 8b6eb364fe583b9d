"""A build context: the files of a folder that a Dockerfile may copy."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from e2b_dockerfile_utils import PatternMatcher

from atropos.errors import ConfigError

NEVER = ("__pycache__", ".DS_Store")
"""Files that tools leave on an author's machine."""
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Context:
    """A build context: a folder, and the patterns of what in it can't be copied."""

    folder: Path
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, folder: Path, dockerfile: Path | None) -> Context:
        """The context with its ignore file: one beside the Dockerfile that has its name comes first.

        Raises:
            ConfigError: a pattern that can't be read.
        """
        own = dockerfile or folder / "Dockerfile"
        for path in (own.with_name(f"{own.name}.dockerignore"), folder / ".dockerignore"):
            if path.is_file():
                lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
                # `#` at the very beginning alone: a name may start with it after a blank.
                patterns = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
                try:
                    PatternMatcher(list(patterns))
                except ValueError as error:
                    raise ConfigError(f"{path}: {error}") from None
                return cls(folder, patterns)
        return cls(folder)

    def sources(self, pattern: str, exclude: Sequence[str], *, deep: bool = False) -> list[Path]:
        """The files or folders that a COPY source names.

        Args:
            pattern: the source, in which `*` matches a leading dot too. As with BuildKit, it may match nothing.
            exclude: patterns of names that are left out; a folder is never left out by its own name.
            deep: `**` stands for any number of folders, as it does with --parents.

        Raises:
            ConfigError: there is none, and the source is no pattern.
        """
        pattern = posixpath.normpath(pattern)
        if pattern == ".":
            return [self.folder]
        plain = self.folder / pattern
        matching = [plain] if os.path.lexists(plain) else self._glob(pattern, deep=deep)
        included = self._kept(exclude)
        paths = [path for path in matching if path.is_dir() or included(path, path.name)]
        if not paths and not _WILD.search(pattern):
            why = "is left out by .dockerignore or --exclude" if matching else "is missing"
            raise ConfigError(f"{plain}: {why}, and a COPY needs it")
        return paths

    def matching(self, pattern: str, exclude: Sequence[str]) -> list[str]:
        """The names that match a source with `*`, `?` or `[`; itself without these."""
        if not _WILD.search(pattern):
            return [pattern]
        return [path.relative_to(self.folder).as_posix() for path in self.sources(pattern, exclude)]

    def _glob(self, pattern: str, *, deep: bool) -> list[Path]:
        # Go's patterns negate with `^`, Python's with `!`.
        text = pattern.replace("[^", "[!")
        deepest = f"{text}/*" if text.endswith("**") else text
        matching = self.folder.glob(
            deepest if deep else re.sub(r"\*+", "*", text)
        )  # with Docker, `**` is no more than `*`
        return sorted(path for path in matching if path.name not in NEVER)

    def followed(self, path: Path) -> Path:
        """Where a COPY source is once its links are followed: as Docker has it, what a link names is copied.

        Raises:
            ConfigError: it leads to nothing, or out of the context.
        """
        # Both, as the context itself may be reached by a link.
        target, top = (Path(os.path.realpath(each)) for each in (path, self.folder))
        if not target.exists() or not target.is_relative_to(top):
            leads = f"a link to {os.readlink(path)}" if path.is_symlink() else f"leads to {target}"
            raise ConfigError(f"{path}: {leads}, which is not in the build context")
        return self.folder / target.relative_to(top)

    def below(self, folder: Path, exclude: Sequence[str]) -> Iterator[tuple[str, Path]]:
        """(name from there, path) of all in a folder that isn't left out, and of the folders above it.

        Args:
            folder: in the context.
            exclude: patterns of names as they are from there.
        """
        included = self._kept(exclude)
        ignored: dict[str, Path] = {}
        for name, path in walk(folder):
            if included(path, name):
                # `!folder/file` brings one file back, and with it the folders that lead to it.
                for above in [each for each in ignored if name.startswith(f"{each}/")]:
                    yield above, ignored.pop(above)
                yield name, path
            elif path.is_dir() and not path.is_symlink():
                ignored[name] = path

    def _kept(self, exclude: Sequence[str]) -> Callable[[Path, str], bool]:
        """Whether a path is copied: the ignore file judges its name in the context, `exclude` that in its source."""
        ignored, excluded = PatternMatcher(list(self.ignored)), PatternMatcher(list(exclude))
        return lambda path, name: (
            not (ignored.matches(path.relative_to(self.folder).as_posix()) or excluded.matches(name))
        )


def _refuse(error: OSError) -> None:
    """Raise what would make an existing folder look empty; a missing or forbidden one counts as empty."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError | PermissionError):
        raise error


def walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name from there, path) of all below a folder, folders before what is in them.

    Raises:
        OSError: a folder can't be read for now: out of descriptors, a share that doesn't answer.
    """
    for root, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = sorted(name for name in folders if name not in NEVER)
        for name in sorted([*folders, *(file for file in files if file not in NEVER)]):
            path = Path(root, name)
            yield path.relative_to(folder).as_posix(), path
