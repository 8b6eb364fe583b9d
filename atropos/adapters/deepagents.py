"""Slots as backends of deepagents: `create_deep_agent(backend=AtroposBackend())`."""

from __future__ import annotations

import base64
import errno
import re
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from atropos.adapters.extras import extra

with extra("deepagents"):
    from deepagents.backends.sandbox import BaseSandbox

from deepagents.backends.protocol import (
    DeleteResult,
    EditResult,
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
    GlobResult,
    GrepResult,
    LsResult,
    ReadResult,
    WriteResult,
)
from deepagents.backends.utils import (
    InvalidGlobPatternError,
    check_empty_content,
    compile_grep_include_glob,
    create_file_data,
    perform_string_replacement,
    slice_read_response,
)
from typing_extensions import override

from atropos import wire
from atropos.adapters import folders
from atropos.adapters.process_slots import LazySlot
from atropos.adapters.sharing import (
    CANNOT_EXECUTE,
    HeldSlot,
    SlotRequest,
    infrastructure,
    shell_code,
    time_limit,
)
from atropos.event_loop import event_loop
from atropos.slots.slot.results import answered
from atropos.tools.sandboxed.text import with_line_ends

T = TypeVar("T")
TIMED_OUT = 124
"""Exit code of a command that took too long, as of `timeout`."""
MAX_MATCHES = 10_000
"""Most files or lines that a search finds."""
_ERRORS = {
    errno.ENOENT: "file_not_found",
    errno.EACCES: "permission_denied",
    errno.EISDIR: "is_directory",
    errno.ENOTDIR: "invalid_path",
    errno.EINVAL: "invalid_path",
}


class AtroposBackend(BaseSandbox):
    """One slot, from its first use until `close`. Every method raises `SandboxGoneError` when it is gone.

    Files are read, searched and written by the slot itself, so that an image needs no Python for them.

    Args:
        settings: fields of `SlotRequest`.
    """

    def __init__(self, **settings: Any) -> None:
        self._slot = LazySlot(SlotRequest(**settings), "deepagents")

    @property
    @override
    def id(self) -> str:
        return self._slot.lease_id or "not-started"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._slot.close()

    def close(self) -> None:
        """Give the slot back, with all that runs in it. Idempotent."""
        event_loop().run(self._slot.close())

    # ------------------------------------------------------------------------------------------- both ways to call

    @override
    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return blocking(self._execute(command, timeout))

    @override
    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return await waiting(self._execute(command, timeout))

    @override
    def ls(self, path: str) -> LsResult:
        return blocking(self._ls(path))

    @override
    async def als(self, path: str) -> LsResult:
        return await waiting(self._ls(path))

    @override
    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return blocking(self._read(file_path, offset, limit))

    @override
    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        return await waiting(self._read(file_path, offset, limit))

    @override
    def write(self, file_path: str, content: str) -> WriteResult:
        return blocking(self._write(file_path, content))

    @override
    async def awrite(self, file_path: str, content: str) -> WriteResult:
        return await waiting(self._write(file_path, content))

    @override
    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return blocking(self._edit(file_path, old_string, new_string, replace_all))

    @override
    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        return await waiting(self._edit(file_path, old_string, new_string, replace_all))

    @override
    def delete(self, file_path: str) -> DeleteResult:
        return blocking(self._delete(file_path))

    @override
    async def adelete(self, file_path: str) -> DeleteResult:
        return await waiting(self._delete(file_path))

    @override
    def grep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        return blocking(self._grep(pattern, path, glob, max_count))

    @override
    async def agrep(
        self, pattern: str, path: str | None = None, glob: str | None = None, *, max_count: int | None = None
    ) -> GrepResult:
        return await waiting(self._grep(pattern, path, glob, max_count))

    @override
    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        return blocking(self._glob(pattern, path))

    @override
    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        return await waiting(self._glob(pattern, path))

    @override
    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return blocking(self._upload(files))

    @override
    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return await waiting(self._upload(files))

    @override
    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return blocking(self._download(paths))

    @override
    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return await waiting(self._download(paths))

    # ----------------------------------------------------------------------------------- in the process's event loop

    async def _execute(self, command: str, timeout: int | None) -> ExecuteResponse:
        held = await self._slot.get()
        limit = timeout or None
        result = await held.slot.exec(command, timeout_s=limit, workdir=held.folder, user=held.user, concurrent=True)
        if result.timed_out:
            late = f"{result.output}\nThe command was ended: it took longer than {time_limit(result, limit)}."
            return ExecuteResponse(late, TIMED_OUT, result.truncated)
        code = CANNOT_EXECUTE if result.exit_code is None else shell_code(result.exit_code)
        return ExecuteResponse(result.output, code, result.truncated)

    async def _ls(self, path: str) -> LsResult:
        held = await self._slot.get()
        try:
            entries = await folders.list_folder(held, held.path(path))
        except OSError as error:
            return LsResult(error=f"Path '{path}': {error.strerror}")
        return LsResult(entries=[{"path": entry.path, "is_dir": entry.is_dir} for entry in entries])

    async def _read(self, file_path: str, offset: int, limit: int) -> ReadResult:
        held = await self._slot.get()
        try:
            data = await held.slot.read_file(held.path(file_path), user=held.user)
        except OSError as error:
            return ReadResult(error=f"File '{file_path}': {_ERRORS.get(error.errno or 0, error.strerror)}")
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return ReadResult(file_data={"content": base64.b64encode(data).decode(), "encoding": "base64"})
        if (reminder := check_empty_content(text)) is not None:
            return ReadResult(file_data={"content": reminder, "encoding": "utf-8"})
        return slice_read_response(create_file_data(text), offset, limit)

    async def _write(self, file_path: str, content: str) -> WriteResult:
        (written,) = await self._upload([(file_path, content.encode())])
        if written.error is not None:
            return WriteResult(error=f"Failed to write file '{file_path}': {written.error}")
        return WriteResult(path=file_path)

    async def _edit(self, file_path: str, old: str, new: str, replace_all: bool) -> EditResult:
        held = await self._slot.get()
        try:
            text = (await held.slot.read_file(held.path(file_path), user=held.user)).decode()
        except (OSError, UnicodeDecodeError) as error:
            why = "not a text file" if isinstance(error, UnicodeDecodeError) else error.strerror
            return EditResult(error=f"Error editing file '{file_path}': {why}")
        edited = perform_string_replacement(text, *with_line_ends(text, old, new), replace_all)
        if isinstance(edited, str):
            return EditResult(error=edited)
        written = await self._write(file_path, edited[0])
        return EditResult(error=written.error, path=written.path, occurrences=None if written.error else edited[1])

    async def _delete(self, file_path: str) -> DeleteResult:
        held = await self._slot.get()
        try:
            await folders.remove(held, held.path(file_path))
        except FileNotFoundError:
            return DeleteResult(error=f"Error: '{file_path}' not found")
        except OSError as error:
            return DeleteResult(error=f"Error deleting file '{file_path}': {error.strerror}")
        return DeleteResult(path=file_path)

    async def _grep(self, pattern: str, path: str | None, glob: str | None, max_count: int | None) -> GrepResult:
        held = await self._slot.get()
        top = held.path(path or ".")
        most = MAX_MATCHES if max_count is None else min(max_count, MAX_MATCHES)
        try:
            included = None if glob is None else compile_grep_include_glob(glob)
            answer = await search(held, re.escape(pattern), top, glob, MAX_MATCHES if glob else most)
        except (OSError, InvalidGlobPatternError) as error:
            return GrepResult(error=f"Path '{top}': {error}")
        lines = [match for match in answer.matches if included is None or included(below(top, match.path))]
        matches = [{"path": match.path, "line": match.line, "text": match.text} for match in lines[:most]]
        return GrepResult(matches=matches, truncated=answer.truncated or len(lines) > most)  # pyright: ignore[reportArgumentType]

    async def _glob(self, pattern: str, path: str | None) -> GlobResult:
        held = await self._slot.get()
        top = held.path(path or ".")
        try:
            matched = compile_grep_include_glob(pattern)
            answer = await search(held, "", top, pattern, MAX_MATCHES)
        except (OSError, InvalidGlobPatternError) as error:
            return GlobResult(error=f"Path '{top}': {error}")
        paths = sorted(match.path for match in answer.matches if matched(below(top, match.path)))
        cut = "budget" if answer.truncated else None
        files = [{"path": path, "is_dir": False} for path in paths]
        return GlobResult(matches=files, truncated=answer.truncated, truncation_reason=cut)  # pyright: ignore[reportArgumentType]

    async def _upload(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        held = await self._slot.get()
        return [FileUploadResponse(path, await self._written(held, path, data)) for path, data in files]

    @staticmethod
    async def _written(held: HeldSlot, path: str, data: bytes) -> str | None:
        """Why a file can't be written, if it can't."""
        try:
            await held.slot.write_file(held.path(path), data, user=held.user)
        except OSError as error:
            return _ERRORS.get(error.errno or 0, str(error))
        return None

    async def _download(self, paths: list[str]) -> list[FileDownloadResponse]:
        held = await self._slot.get()
        responses: list[FileDownloadResponse] = []
        for path in paths:
            try:
                content = await held.slot.read_file(held.path(path), user=held.user)
                responses.append(FileDownloadResponse(path, content))
            except OSError as error:
                responses.append(FileDownloadResponse(path, error=_ERRORS.get(error.errno or 0, str(error))))
        return responses


def blocking(work: Coroutine[Any, Any, T]) -> T:
    """Wait for work in the process's event loop."""
    with infrastructure():
        return event_loop().run(work)


async def waiting(work: Coroutine[Any, Any, T]) -> T:
    """As `blocking`, in any event loop."""
    with infrastructure():
        return await event_loop().wait(work)


async def search(held: HeldSlot, pattern: str, top: str, glob: str | None, most: int) -> wire.SearchResult:
    """Lines that match, or with an empty pattern files, whose names fit the last part of a glob as far as it is plain.

    Raises:
        OSError: there is no such path.
        SandboxError: the infrastructure failed.
    """
    last = (glob or "").rpartition("/")[2]
    plain = last if last and last != "**" and not set(last) & set("[{\\") else None
    operation = wire.Search(pattern=pattern, path=top, glob=plain, max_matches=most)
    return answered(await held.slot.run(operation), wire.SearchResult, top)


def below(top: str, path: str) -> str:
    """A path relative to a folder that it is in."""
    return path.removeprefix(top).lstrip("/") or path.rpartition("/")[2]
