"""Watching a folder of a sandbox by comparing listings: works in every image, and leaves no process behind."""

from __future__ import annotations

import asyncio
import itertools
import posixpath
import secrets
from collections.abc import AsyncGenerator

from atropos.api.e2b import files, messages
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.sandbox import E2bSandbox, Listing, Watcher

MAX_WATCHERS = 64
MAX_DEPTH = 100
INTERVAL_S = 0.25
"""Pause between two listings of a watcher that streams."""


def changes(before: Listing, after: Listing) -> list[tuple[str, str]]:
    """The events between two listings, each with its path."""
    gone: dict[tuple[int, str], list[str]] = {}  # several where a file had several names
    for path in sorted(before.keys() - after.keys(), reverse=True):
        gone.setdefault(before[path][:2], []).append(path)
    events: list[tuple[str, str]] = []
    for path in sorted(after.keys() - before.keys()):
        inode, kind, _, size, _ = after[path]
        if names := gone.get((inode, kind)):
            events += [("RENAME", names.pop()), ("CREATE", path)]
            continue
        events.append(("CREATE", path))
        if kind == "f" and size:
            events.append(("WRITE", path))
    events += [("REMOVE", path) for path in sorted(itertools.chain(*gone.values()))]
    for path in sorted(after.keys() & before.keys()):
        old_inode, old_kind, old_mode, *was = before[path]
        inode, kind, mode, *now = after[path]
        if kind == "f" and (was != now or inode != old_inode or kind != old_kind):
            events.append(("WRITE", path))
        if mode != old_mode:
            events.append(("CHMOD", path))
    return events


async def _added(sandbox: E2bSandbox, message: messages.Watch, user: str | None) -> str:
    """Begin to watch; the watcher's id.

    Raises:
        RpcError: the folder isn't there, or there are too many watchers.
    """
    if len(sandbox.watchers) >= MAX_WATCHERS:
        raise RpcError("resource_exhausted", f"{MAX_WATCHERS} watchers of this sandbox exist")
    watcher_id = secrets.token_hex(8)
    depth = MAX_DEPTH if message.recursive else 1
    watcher = sandbox.watchers[watcher_id] = Watcher(files.path_of(sandbox, message.path), depth, user)
    try:
        await _look(sandbox, watcher)
    except BaseException:
        del sandbox.watchers[watcher_id]
        raise
    return watcher_id


async def _look(sandbox: E2bSandbox, watcher: Watcher) -> list[Json]:
    """The events since the last listing; none at the first.

    Raises:
        RpcError: the folder isn't there.
    """
    try:
        folder, *entries = await files.find(sandbox, watcher.path, watcher.depth, watcher.user)
    except RpcError as error:
        if watcher.listing is None or error.code != "not_found":
            raise
        entries = []
    else:
        if folder.kind != "d":
            raise RpcError("invalid_argument", f"path {watcher.path!r} is no directory")
    listing: Listing = {one.path: (one.inode, one.kind, one.mode, one.size, one.modified) for one in entries}
    events = [] if watcher.listing is None else changes(watcher.listing, listing)
    watcher.listing = listing
    return [{"name": posixpath.relpath(path, watcher.path), "type": f"EVENT_TYPE_{kind}"} for kind, path in events]


async def watch_dir(
    sandbox: E2bSandbox, message: messages.Watch, *, user: str | None, deadline_s: float | None, ping_s: float
) -> AsyncGenerator[Json]:
    """`WatchDir`: events until the client goes away, or its deadline."""
    watcher_id = await _added(sandbox, message, user)
    try:
        yield {"start": {}}
        loop = asyncio.get_running_loop()
        started = pinged = loop.time()
        while deadline_s is None or loop.time() < started + deadline_s:
            await asyncio.sleep(INTERVAL_S)
            for event in await _look(sandbox, sandbox.watchers[watcher_id]):
                yield {"filesystem": event}
            if loop.time() >= pinged + ping_s:
                pinged = loop.time()
                yield {"keepalive": {}}
        raise TimeoutError
    finally:
        del sandbox.watchers[watcher_id]


async def create_watcher(sandbox: E2bSandbox, message: messages.Watch, user: str | None) -> Json:
    """`CreateWatcher`."""
    return {"watcherId": await _added(sandbox, message, user)}


async def get_watcher_events(sandbox: E2bSandbox, message: messages.OfWatcher) -> Json:
    """`GetWatcherEvents`."""
    watcher = sandbox.watchers.get(message.watcher_id)
    if watcher is None:
        raise RpcError("not_found", f"there is no watcher {message.watcher_id[:100]!r}")
    return {"events": await _look(sandbox, watcher)}


async def remove_watcher(sandbox: E2bSandbox, message: messages.OfWatcher) -> Json:
    """`RemoveWatcher`."""
    sandbox.watchers.pop(message.watcher_id, None)
    return {}
