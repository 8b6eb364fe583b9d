"""Unpacks layers of images, as overlay keeps them. Standard library only.

A layer's place gets `files/`, and `needs`: what `settle` does once the layers below it are here; and `tar`, from which
`repack` makes the tar again, where all that it had in files is still there.

Layers come from strangers. A member is opened below its parent's descriptor and no link is ever followed, so nothing
reaches outside PLACE; names that try are refused. What a whiteout hides is a lower layer's (OCI image layout, "Layer
Filesystem Changeset"). Device nodes are left out. Owners are those of the running user namespace, of which slots have
the ids 0 to `ids`-1; with one id everything belongs to root.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, Self, cast

from atropos.archives import XATTR, WholeTar
from atropos.images.folders import Folders, WrongFolder
from atropos.images.tar_record import TarRecord
from atropos.images.tar_stream import TarStream
from atropos.images.untrusted import BROKEN, ImageRefused

NEEDS, RECORD = "needs", "tar"
"""Files of a layer's place."""
BLOCK = 4096
CHUNK = 1 << 20
NS = 1_000_000_000
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
CAPABILITY = "security.capability"
_PLAIN_KINDS = {tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.XHDTYPE}
_NUMBERS = [slice(100, 108), slice(108, 116), slice(116, 124), slice(124, 136), slice(136, 148), slice(148, 156)]
"""Where a header has mode, owner, group, size, time and checksum, in octal (POSIX.1-1988, ustar)."""
_TEXTS = [slice(0, 100), slice(157, 257), slice(345, 500)]
"""Where it has name, target and the name's beginning."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Member(WholeTar):
    """A member of a layer."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """As the tar module reads a header, but what is the same in most of them in a third of the time."""
        # `typeflag` of the header.
        kind = bytes(buf[156:157])
        if len(buf) != tarfile.BLOCKSIZE or kind not in _PLAIN_KINDS:
            return super().frombuf(buf, encoding, errors)
        try:
            mode, uid, gid, size, mtime, checksum = (
                int(bytes(buf[part]).strip(b" \0") or b"0", 8) for part in _NUMBERS
            )
        except ValueError:  # not octal
            return super().frombuf(buf, encoding, errors)
        # The checksum is that of the header with spaces in its own place (POSIX.1-1988, ustar). tarfile also takes the
        # signed sum of old tars.
        if sum(buf) - sum(buf[148:156]) + 8 * ord(" ") != checksum:
            return super().frombuf(buf, encoding, errors)
        name, linkname, prefix = (bytes(buf[part]).partition(b"\0")[0].decode(encoding, errors) for part in _TEXTS)
        member = cls(f"{prefix}/{name}" if prefix else name)
        member.mode, member.uid, member.gid, member.size, member.mtime = mode, uid, gid, size, mtime
        member.type, member.linkname, member.chksum = kind, linkname, checksum
        if kind == tarfile.DIRTYPE:
            member.name = member.name.rstrip("/")
        return member


@dataclass
class Needs:
    """What a layer takes from those below it, by paths.

    Attributes:
        folders: folders that it has something in, but doesn't describe; those above others come first.
        hidden: what its whiteouts hide.
        opaque: folders in which all is hidden that lower layers have.
        links: hard links to files of lower layers: where there is an empty file as yet.
    """

    folders: dict[str, None] = field(default_factory=dict[str, None])
    hidden: dict[str, None] = field(default_factory=dict[str, None])
    opaque: dict[str, None] = field(default_factory=dict[str, None])
    links: dict[str, str] = field(default_factory=dict[str, str])

    def forget(self, path: str) -> None:
        """Something else comes in the place of what the layer itself had there."""
        for paths in (self.folders, self.hidden, self.opaque, self.links):
            # With the slash, so that `a` doesn't forget `ab`.
            for each in [each for each in paths if f"{each}/".startswith(f"{path}/")]:
                del paths[each]


class Layer:
    """The folder that a layer is unpacked into."""

    def __init__(self, folder: str, max_bytes: int, max_members: int, ids: int) -> None:
        self._max_bytes, self._max_members, self._ids = max_bytes, max_members, ids
        self._room = f"the {max_bytes >> 20} MiB that the image store has room for (image_store.quota_mib)"
        self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folders = Folders(self._root, self._make_folder)
        self._times: dict[str, int] = {}
        # The root, too, is as below it unless a member describes it.
        self.needs = Needs({"": None})
        self.bytes = 0
        self.members = 0
        self.is_complete = True
        """Whether no file's content was replaced."""
        self.end = 0
        """Where the content of the last file ends in the tar."""

    def close(self) -> None:
        """Close all that it has open."""
        self._folders.close()

    @property
    def stands_alone(self) -> bool:
        """Whether it is the same on all other layers, but for the attributes of the image's root."""
        needs = self.needs
        return not (needs.hidden or needs.opaque or needs.links or needs.folders.keys() - {""})

    def fill(self, stream: TarStream) -> None:
        """Unpack an uncompressed tar."""
        with tarfile.TarFile(
            fileobj=cast("IO[bytes]", stream), encoding="utf-8", errors="surrogateescape", tarinfo=Member
        ) as tar:
            # One after the other, as they come: iterating over the TarFile would do the same, but keeps a list of all
            # members.
            while (member := tar.next()) is not None:
                self._member(tar, stream, member)
                vars(tar)["members"].clear()  # a million of them are gigabytes
        # At the end: each file that is made in a folder changes the folder's time.
        for path, at in self._times.items():
            with contextlib.suppress(WrongFolder):
                os.utime(self._folders.open(path), ns=(at, at))

    def _member(self, tar: tarfile.TarFile, stream: TarStream, member: tarfile.TarInfo) -> None:
        self.members += 1
        if self.members > self._max_members:
            raise ImageRefused(f"more than {self._max_members} files and folders")
        path = checked(member.name)
        where, _, name = path.rpartition("/")
        # Before all else: a whiteout is an empty file by its type.
        if name.startswith(WHITEOUT):
            self._whiteout(where, name)
        elif not path:
            self._describe("", self._root, member)
        elif member.isdir():
            self._folder(path, where, name, member)
        # A slot could not open a device node, and overlay takes one with number 0/0 for a whiteout.
        elif not (member.ischr() or member.isblk()):
            parent = self._folders.open(where, make=True)
            # What is made here hides the lower one by itself.
            self.needs.hidden.pop(path, None)
            try:
                self._make(tar, stream, parent, path, name, member)
            # Tried first and cleared only then: hardly any layer has a name twice, and a look before each would cost a
            # system call.
            except FileExistsError:
                self._clear(parent, path, name)
                self._make(tar, stream, parent, path, name, member)

    def _folder(self, path: str, where: str, name: str, member: tarfile.TarInfo) -> None:
        parent = self._folders.open(where, make=True)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                self._clear(parent, path, name)
                self.needs.hidden[path] = None  # what it hid stays hidden
        self._describe(path, self._folders.open(path, make=True), member)

    def _describe(self, path: str, fd: int, member: tarfile.TarInfo) -> None:
        self._adopt(fd, member)
        self.needs.folders.pop(path, None)
        self._times[path] = mtime_ns(member)

    def _make(
        self, tar: tarfile.TarFile, stream: TarStream, parent: int, path: str, name: str, member: tarfile.TarInfo
    ) -> None:
        """Make what a member is, if there is nothing of its name yet."""
        if member.isreg():
            self._file(tar, stream, parent, path, member)
        elif member.issym():
            os.symlink(member.linkname, name, dir_fd=parent)
            self._own_link(parent, name, member)
        elif member.islnk():
            self._link(parent, path, name, member)
        elif member.isfifo():
            os.mkfifo(name, 0o600, dir_fd=parent)
            # O_NONBLOCK: to open a FIFO for reading waits for a writer otherwise (fifo(7)).
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            self._finish(fd, member)
        else:
            raise ImageRefused(f"{path}: an entry of unknown type {member.type!r}")

    def _file(self, tar: tarfile.TarFile, stream: TarStream, parent: int, path: str, member: tarfile.TarInfo) -> None:
        # By the header already, before it is read for minutes.
        if member.size > self._max_bytes:
            raise ImageRefused(f"{member.name}: a file of {member.size} bytes, more than {self._room}")
        fd, size = os.open(path.rpartition("/")[2], _NEW, 0o600, dir_fd=parent), 0
        # GNU's sparse files: their blocks are not contiguous in the tar, so tarfile puts them together.
        if member.issparse():
            source = tar.extractfile(member)
            assert source is not None
            pieces = iter(lambda: source.read(CHUNK), b"")
        else:
            pieces = stream.content(path, member.size)
            self.end = member.offset_data + member.size
        content = written = 0
        """Bytes that are no holes, and those up to which the file is there."""
        for piece in pieces:
            size += len(piece)
            # The two ends first: nearly all other pieces are told by them.
            if not piece[0] and not piece[-1] and bytes(piece).count(0) == len(piece):
                os.lseek(fd, size, os.SEEK_SET)  # a hole stays one
            else:
                self.count(_blocks(content + len(piece)) - _blocks(content))
                _write(fd, piece)
                content += len(piece)
                written = size
        # A hole at the end is made by no seek.
        if written < size:
            os.ftruncate(fd, size)
        self.count(BLOCK)
        self._finish(fd, member)

    def _finish(self, fd: int, member: tarfile.TarInfo) -> None:
        self._adopt(fd, member)
        at = mtime_ns(member)
        os.utime(fd, ns=(at, at))
        os.close(fd)

    def _link(self, parent: int, path: str, name: str, member: tarfile.TarInfo) -> None:
        target = checked(member.linkname)
        where, _, last = target.rpartition("/")
        try:
            os.link(last, name, src_dir_fd=self._folders.open(where), dst_dir_fd=parent, follow_symlinks=False)
        except (FileNotFoundError, WrongFolder) as error:
            if isinstance(error, WrongFolder) and not error.is_missing:
                raise
            # An empty file stands for it until `settle` knows the layers below.
            os.close(os.open(name, _NEW, 0o600, dir_fd=parent))
            self.needs.links[path] = target
            self.count(BLOCK)
        # link(2) refuses folders with EPERM.
        except (IsADirectoryError, PermissionError) as error:
            raise ImageRefused(f"{member.name}: a hard link to {member.linkname}: {error.strerror}") from None
        else:
            # A link to what is itself an empty stand-in: it, too, is to become the lower file.
            if (lower := self.needs.links.get(target)) is not None:
                self.needs.links[path] = lower

    def _whiteout(self, where: str, name: str) -> None:
        """Hide what lower layers have; what this layer itself has stays."""
        hidden = name.removeprefix(WHITEOUT)
        path = f"{where}/{hidden}" if where else hidden
        if name == OPAQUE:
            self.needs.opaque[where] = None
        elif hidden not in {"", ".", ".."}:
            try:
                mode = os.stat(hidden, dir_fd=self._folders.open(where), follow_symlinks=False).st_mode
            except (FileNotFoundError, WrongFolder):
                self.needs.hidden[path] = None
            else:
                # A whiteout hides what is below alone, in whatever order the members come; what this layer has there
                # stays.
                if stat.S_ISDIR(mode):
                    self.needs.opaque[path] = None

    def _clear(self, parent: int, path: str, name: str) -> None:
        """Remove what this layer has under a name."""
        self.is_complete = False
        self.needs.forget(path)
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
        if not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=parent)
            return
        self._folders.forget(path)
        # By descriptors, so that no link on the way is followed.
        for _, folders, files, fd in os.fwalk(name, topdown=False, dir_fd=parent):
            for each in files:
                os.unlink(each, dir_fd=fd)
            for each in folders:
                try:
                    os.rmdir(each, dir_fd=fd)
                except NotADirectoryError:
                    os.unlink(each, dir_fd=fd)  # a link to a folder
        os.rmdir(name, dir_fd=parent)

    def _make_folder(self, parent: int, name: str, path: str) -> None:
        """Make a folder that is not described yet, and perhaps never."""
        os.mkdir(name, 0o755, dir_fd=parent)
        os.chown(name, 0, 0, dir_fd=parent, follow_symlinks=False)
        self.count(BLOCK)
        # Its whiteout came before the folder, which a folder in overlay says by being opaque.
        if path in self.needs.hidden:
            del self.needs.hidden[path]
            self.needs.opaque[path] = None
        elif not any(covers(path, each) for each in self.needs.opaque):
            self.needs.folders[path] = None

    def _adopt(self, fd: int, member: tarfile.TarInfo) -> None:
        """Owner, mode and the attributes that mean something in a slot."""
        # In this order: chown(2) clears set-user-ID bits and file capabilities.
        os.fchown(fd, *self._owner(member))
        os.fchmod(fd, member.mode & 0o7777)
        for key, value in member.pax_headers.items():
            name = key.removeprefix(XATTR)
            # `trusted.` and other `security.` ones mean something to this host; `user.overlay.` would forge what
            # overlay itself writes.
            copied = name == CAPABILITY or (name.startswith("user.") and not name.startswith("user.overlay."))
            if key.startswith(XATTR) and copied:
                with contextlib.suppress(OSError):  # a file system without such attributes
                    os.setxattr(fd, name, value.encode("utf-8", "surrogateescape"))

    def _own_link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        user, group = self._owner(member)
        os.chown(name, user, group, dir_fd=parent, follow_symlinks=False)
        at = mtime_ns(member)
        os.utime(name, ns=(at, at), dir_fd=parent, follow_symlinks=False)
        self.count(BLOCK)

    def _owner(self, member: tarfile.TarInfo) -> tuple[int, int]:
        # A server that maps one id alone, as an ordinary user's may.
        if self._ids == 1:
            return 0, 0
        if not (0 <= member.uid < self._ids and 0 <= member.gid < self._ids):
            raise ImageRefused(
                f"{member.name}: owner {member.uid}:{member.gid} is not among the {self._ids} ids of a slot; give it "
                "another one where the image is built (chown, or tar --no-same-owner)"
            )
        return member.uid, member.gid

    def count(self, size: int) -> None:
        """Take room."""
        self.bytes += _blocks(size)
        if self.bytes > self._max_bytes:
            raise ImageRefused(f"it unpacks to more than {self._room}")


def _blocks(size: int) -> int:
    """Bytes that as many take on a disk."""
    return -(-size // BLOCK) * BLOCK


def covers(path: str, folder: str) -> bool:
    """Whether a path leads into a folder."""
    return path.startswith(f"{folder}/") if folder else True


def _write(fd: int, data: memoryview | bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def checked(name: str) -> str:
    """A member's path, plain, from the image's root; ko and kaniko write names that begin there.

    Raises:
        ImageRefused: it climbs, or is no name.
    """
    # Refused rather than cleaned: no builder writes such names, so it is an attack.
    if "\0" in name or ".." in name.split("/"):
        raise ImageRefused(f"{name!r:.200}: a path that leaves the image")
    return "/".join(part for part in name.split("/") if part not in {"", "."})


def mtime_ns(member: tarfile.TarInfo) -> int:
    """When a member was changed: an extended header says it to the nanosecond, of which a float loses some."""
    seconds, _, fraction = member.pax_headers.get("mtime", "").partition(".")
    if not (seconds + fraction).isdecimal():
        # 1 << 33 is in the year 2242; ext4's times end in 2446, and a header may name any number.
        return int(min(max(member.mtime, 0), 1 << 33)) * NS
    return min(int(seconds or "0"), 1 << 33) * NS + int(fraction[:9].ljust(9, "0"))


def unpack(
    packed: Iterator[bytes], place: str, diff_id: str, *, max_bytes: int, max_members: int, ids: int
) -> dict[str, object]:
    """Unpack a layer into a folder.

    Args:
        packed: it, as it comes.
        place: the folder.
        diff_id: digest of the tar, SHA-256.
        max_bytes: most that it may take there.
        max_members: most files and folders that it may have.
        ids: how many ids a slot has.

    Returns:
        `bytes`, whether it `stands_alone`, and whether it `has_root`, the attributes of the image's root.

    Raises:
        ImageRefused: it is no layer, not the one of this digest, or has what an image must not hold.
    """
    os.mkdir(f"{place}/files", 0o755)
    with (
        contextlib.closing(Layer(f"{place}/files", max_bytes, max_members, ids)) as layer,
        open(f"{place}/{RECORD}", "wb") as file,
    ):
        record = TarRecord(file, layer.count)
        # Contents are bounded by the disk's room, but holes take none; a member has a header and a block that is filled
        # up.
        stream = TarStream(packed, 2 * max_bytes + max_members * 1024, record)
        _fill(layer, stream, diff_id)
        record.finish(stream.size)
    if not layer.is_complete:
        # Without it the layer is pulled by each host (decision 28).
        os.unlink(file.name)
    with open(f"{place}/{NEEDS}", "w", encoding="ascii") as file:
        json.dump(asdict(layer.needs), file)
    return {"bytes": layer.bytes, "stands_alone": layer.stands_alone, "has_root": "" not in layer.needs.folders}


def _fill(layer: Layer, stream: TarStream, diff_id: str) -> None:
    try:
        layer.fill(stream)
        digest = stream.finish()
        # `TarStream` fills the last block up with zeros, which a cut-off file's content would be taken from.
        if stream.size < layer.end:
            raise EOFError("unexpected end of data")
    except (tarfile.TarError, *BROKEN, ValueError) as error:
        raise ImageRefused(f"layer {diff_id[:12]} is no tar: {error}") from None
    # Last, as the digest is that of all bytes; until then nothing uses what was unpacked.
    if digest != diff_id:
        raise ImageRefused(f"layer {diff_id[:12]} is not the one that the image names ({digest[:12]})")
