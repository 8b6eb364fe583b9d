"""What commands of a slot start with: folder, variables and user, as an image's configuration gives them."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field

from atropos import wire

WORKSPACE = "/workspace"
"""Where commands start and relative paths begin in a slot without a profile."""
ROOT_HOME = "/root"


@dataclass(frozen=True)
class UserAccount:
    """A user of the slot's own /etc/passwd.

    Attributes:
        member: whether it has the further groups that /etc/group gives it.
    """

    name: str
    uid: int
    gid: int
    home: str
    member: bool = False


@dataclass(frozen=True)
class Profile:
    """Defaults of a slot's operations.

    Attributes:
        workdir: where commands start and relative paths begin; absolute.
        env: added to the slot's environment; a command's own variables win.
        user: whom commands run as; None: the slot's root. Files are always read and written as root.
    """

    workdir: str = WORKSPACE
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    user: UserAccount | None = None

    def path(self, path: str | None) -> str:
        """An absolute path in the slot."""
        return posixpath.join(self.workdir, self.expanded(path or ""))

    def expanded(self, path: str) -> str:
        """The path, with `~` replaced by the home of the user that commands run as."""
        if path != "~" and not path.startswith("~/"):
            return path
        return self.env.get("HOME", ROOT_HOME if self.user is None else self.user.home) + path[1:]

    def applied(self, operation: wire.Operation) -> wire.Operation:
        """The operation with everything that it left open filled in."""
        if isinstance(operation, wire.StartOperation):
            clean = isinstance(operation, wire.Exec) and operation.clean_env
            own = operation.user is not None  # a command's own user: the slot's runner sets its variables
            # From the weakest to the strongest: the user's login, the image's, the call's own.
            env = operation.env if clean else {**({} if own else self.identity), **self.env, **operation.env}
            changes = {"workdir": self.path(operation.workdir), "env": env, "user": operation.user or self.account}
            return operation.model_copy(update=changes)
        if isinstance(operation, wire.PathOperation):
            return operation.model_copy(update={"path": self.path(operation.path)})
        return operation

    @property
    def account(self) -> str | None:
        """The user by its number; and its group's, unless it has others beside it."""
        user = self.user
        return None if user is None else f"{user.uid}" if user.member else f"{user.uid}:{user.gid}"

    @property
    def identity(self) -> dict[str, str]:
        """HOME, USER and LOGNAME of a user; root's are in the slot's environment."""
        user = self.user
        return {} if user is None else {"HOME": user.home, "USER": user.name, "LOGNAME": user.name}


PLAIN = Profile()
"""A slot as the pool gives it."""
