"""Toolsets, the groups that tools are enabled by, and distributions, which draw a random choice of them."""

from __future__ import annotations

import random
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from atropos.errors import ConfigError

TOOLSETS: Mapping[str, str] = MappingProxyType(
    {
        "default": "terminal, process and files: what works in every slot",
        "terminal": "shell commands, and the processes they leave in the background",
        "process": "background processes alone",
        "file": "read, write, patch and search files",
        "session": "full-screen programs on a terminal: keys in, screen out",
        "web": "search the web and read pages (needs a ToolServer)",
        "browser": "a web browser (needs a ToolServer)",
        "mcp": "the tools of the MCP servers behind the ToolServer",
        "all": "everything there is",
    }
)
"""The toolsets that always exist; a tool's own `toolsets` can name further ones."""

EXTERNAL = frozenset({"web", "browser", "mcp"})
"""Toolsets whose tools run on a ToolServer only."""


@dataclass(frozen=True)
class Distribution:
    """For each toolset, the probability that a group of trajectories gets it, independently of the others."""

    name: str
    probabilities: Mapping[str, float]
    description: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        """Check the probabilities.

        Raises:
            ConfigError: names the toolset.
        """
        if not self.probabilities:
            raise ConfigError(f"distribution {self.name!r}: name at least one toolset")
        for toolset, probability in self.probabilities.items():
            if not 0 <= probability <= 1:
                raise ConfigError(f"distribution {self.name!r}: {toolset!r} has {probability}; write 0 to 1")
        if not any(self.probabilities.values()):
            raise ConfigError(f"distribution {self.name!r}: every probability is 0; give one toolset more")

    def among(self, toolsets: Container[str]) -> Distribution:
        """The distribution of those of its toolsets that are among these.

        Raises:
            ConfigError: none is.
        """
        shares = {name: share for name, share in self.probabilities.items() if share > 0 and name in toolsets}
        if not shares:
            raise ConfigError(f"distribution {self.name!r}: no tool is left of {', '.join(self.probabilities)}")
        return Distribution(self.name, shares, self.description)

    def sample(self, seed: int | str | random.Random) -> list[str]:
        """A choice of toolsets, in the order of the definition and never empty.

        The same seed gives the same choice. Where the draw leaves nothing, the most probable toolset is taken.
        """
        generator = seed if isinstance(seed, random.Random) else random.Random(seed)
        drawn = [name for name, probability in self.probabilities.items() if generator.random() < probability]
        return drawn or [max(self.probabilities, key=lambda name: self.probabilities[name])]


DISTRIBUTIONS: dict[str, Distribution] = {
    one.name: one
    for one in (
        Distribution("default", {"terminal": 1.0, "file": 1.0}, "what every slot can do, always"),
        Distribution("terminal_only", {"terminal": 1.0}, "the shell alone"),
        Distribution("terminal_tasks", {"terminal": 1.0, "file": 0.97, "web": 0.97, "browser": 0.1}, "shell first"),
        Distribution("development", {"terminal": 1.0, "file": 1.0, "session": 0.5, "web": 0.3}, "programming"),
        Distribution("interactive", {"terminal": 1.0, "session": 1.0, "file": 0.5}, "full-screen programs"),
        Distribution("research", {"web": 0.95, "browser": 0.7, "file": 0.5, "terminal": 0.3}, "reading the web"),
        Distribution("web_tasks", {"browser": 0.97, "web": 0.9, "terminal": 0.2}, "acting on web pages"),
        Distribution(
            "balanced",
            {"terminal": 0.5, "file": 0.5, "session": 0.5, "web": 0.5, "browser": 0.5},
            "each toolset half of the time",
        ),
    )
}


def register_distribution(distribution: Distribution) -> None:
    """Add a distribution to those known by name.

    Raises:
        ConfigError: another one has that name.
    """
    known = DISTRIBUTIONS.setdefault(distribution.name, distribution)
    if known != distribution:
        raise ConfigError(f"distribution {distribution.name!r} exists with other probabilities")


def get_distribution(name: str) -> Distribution:
    """The distribution of that name.

    Raises:
        ConfigError: there is none; the message names those there are.
    """
    try:
        return DISTRIBUTIONS[name]
    except KeyError:
        raise ConfigError(f"distribution: unknown {name!r}; known: {', '.join(sorted(DISTRIBUTIONS))}") from None
