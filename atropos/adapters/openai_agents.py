"""Slots as sandboxes of OpenAI's Agents SDK: `SandboxRunConfig(client=AtroposSandboxClient())`."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from atropos.adapters.extras import extra

with extra("openai-agents"):
    from agents.sandbox.session import BaseSandboxClient, BaseSandboxClientOptions

from agents.sandbox import Manifest
from agents.sandbox.session import Dependencies, Instrumentation, SandboxSession, SandboxSessionState
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
from typing_extensions import override

from atropos.adapters.openai_agents_session import AtroposSandboxSession, AtroposSandboxSessionState
from atropos.adapters.sharing import SlotRequest


class AtroposSandboxClientOptions(BaseSandboxClientOptions):
    """What differs from the client's settings for one session.

    Attributes:
        image: root file system; None: the client's.
        exposed_ports: of the slot, that `resolve_exposed_port` makes ports of this machine's loopback.
    """

    type: Literal["atropos"] = "atropos"  # pyright: ignore[reportIncompatibleVariableOverride]
    image: str | None = None
    exposed_ports: tuple[int, ...] = ()


class AtroposSandboxClient(BaseSandboxClient[AtroposSandboxClientOptions | None]):
    """Makes sessions, each in a slot of its own.

    Args:
        instrumentation: the SDK's.
        dependencies: the SDK's.
        settings: fields of `SlotRequest`, for all sessions.
    """

    backend_id = "atropos"
    supports_default_options = True

    def __init__(
        self,
        *,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
        **settings: Any,
    ) -> None:
        self._request = SlotRequest(**settings)
        self._instrumentation = instrumentation or Instrumentation()
        self._dependencies = dependencies

    @override
    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: AtroposSandboxClientOptions | None = None,
    ) -> SandboxSession:
        options = options or AtroposSandboxClientOptions()
        session_id = uuid.uuid4()
        state = AtroposSandboxSessionState(
            session_id=session_id,
            snapshot=resolve_snapshot(snapshot, str(session_id)),
            manifest=self._validate_manifest_for_create(manifest or Manifest()),
            exposed_ports=options.exposed_ports,
            image=options.image,
        )
        return self._session(state)

    @override
    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """A session of the slot that a state names, where this process has it; else of a new one."""
        assert isinstance(state, AtroposSandboxSessionState)
        state.assert_path_grants_rebound()
        return self._session(state)

    def _session(self, state: AtroposSandboxSessionState) -> SandboxSession:
        image = state.image or self._request.image
        inner = AtroposSandboxSession(state, self._request.model_copy(update={"image": image}))
        return self._wrap_session(inner, instrumentation=self._instrumentation)

    @override
    async def delete(self, session: SandboxSession) -> SandboxSession:
        """Nothing: `shutdown` gave the slot back."""
        return session

    @override
    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, AtroposSandboxSessionState)
