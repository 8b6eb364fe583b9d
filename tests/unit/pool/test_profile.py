"""What a profile fills in, and what an operation says itself."""

from __future__ import annotations

import pytest

from atropos import wire
from atropos.slots.slot.profile import PLAIN, Profile, UserAccount

ALICE = UserAccount("alice", 1000, 100, "/home/alice")
OF_ALICE = Profile("/srv/app", {"LANG": "C"}, ALICE)


@pytest.mark.parametrize(
    ("profile", "path", "place"),
    [
        (PLAIN, None, "/workspace/"),
        (PLAIN, "a/b", "/workspace/a/b"),
        (PLAIN, "~", "/root"),
        (PLAIN, "~/a", "/root/a"),
        (PLAIN, "~alice/a", "/workspace/~alice/a"),
        (OF_ALICE, "a", "/srv/app/a"),
        (OF_ALICE, "/etc/a", "/etc/a"),
        (OF_ALICE, "~/a", "/home/alice/a"),
        (Profile(env={"HOME": "/elsewhere"}, user=ALICE), "~/a", "/elsewhere/a"),
    ],
)
def test_paths_start_at_the_workdir(profile: Profile, path: str | None, place: str) -> None:
    assert profile.path(path) == place


def test_a_command_has_folder_env_and_user() -> None:
    applied = OF_ALICE.applied(wire.Exec(command="x", workdir="~/in", env={"A": "1"}))
    assert isinstance(applied, wire.Exec)
    assert (applied.workdir, applied.user) == ("/home/alice/in", "1000:100")
    assert applied.env == {"HOME": "/home/alice", "USER": "alice", "LOGNAME": "alice", "LANG": "C", "A": "1"}
    plain = PLAIN.applied(wire.Exec(command="x"))
    assert isinstance(plain, wire.Exec)
    assert (plain.workdir, plain.user, plain.env) == ("/workspace/", None, {})


def test_the_command_s_own_win() -> None:
    profile = Profile("/srv", {"HOME": "/of/profile", "LANG": "C"}, ALICE)
    applied = profile.applied(wire.ProcStart(command="x", env={"LANG": "own"}, user="bob"))
    assert isinstance(applied, wire.ProcStart)
    assert (applied.user, applied.env) == ("bob", {"HOME": "/of/profile", "LANG": "own"})
    clean = profile.applied(wire.Exec(command="x", env={"A": "1"}, clean_env=True))
    assert isinstance(clean, wire.Exec)
    assert clean.env == {"A": "1"}


def test_files_are_roots() -> None:
    applied = OF_ALICE.applied(wire.ReadFile(path="a"))
    assert (applied.path, applied.user) == ("/srv/app/a", None)
    assert OF_ALICE.applied(wire.ProcList()) == wire.ProcList()


def test_a_member_keeps_its_groups() -> None:
    member = UserAccount("alice", 1000, 100, "/home/alice", member=True)
    assert Profile(user=member).account == "1000"
