"""The infrastructure's failures, one type per boundary.

A program that fails in a slot is a *result*. What stands here is different: the infrastructure could not do what it
promised, so whatever the caller was measuring is not known. An environment drops or retries the trajectory and never
scores it (truth 4).
"""

from __future__ import annotations

from atropos.resources import NOTHING, Resources


class SandboxError(Exception):
    """The infrastructure failed; nothing may be concluded about the model.

    Attributes:
        code: the stable name of the failure on the wire and in metrics.
        retryable: whether the same work, on another slot, may well succeed.
    """

    code = "sandbox_error"
    retryable = True


class AcquireTimeout(SandboxError):
    """No slot came free within the time a lease may wait."""

    code = "acquire_timeout"


class SlotLost(SandboxError):
    """The slot, or the container around it, is gone; the call never started, or its effects are gone with the slot."""

    code = "slot_lost"


class LeaseExpired(SandboxError):
    """The lease ended (expired, was released, or belongs to an older epoch); the slot may have another lease."""

    code = "lease_expired"
    retryable = False


class OutcomeUnknown(SandboxError):
    """Whether the call ran is unknown; it was not run again."""

    code = "outcome_unknown"
    retryable = False


class BackendUnavailable(SandboxError):
    """Containers could not be started, reached or listed."""

    code = "backend_unavailable"


class QuotaReached(SandboxError):
    """A share of the pool has used up what it may; the message names the quota."""

    code = "quota"
    retryable = False


class IsolationUnavailable(SandboxError):
    """This host or container can't give the isolation that is promised; the message names the missing setting."""

    code = "isolation_unavailable"
    retryable = False


class ToolServerUnavailable(SandboxError):
    """The ToolServer could not be reached or sent an invalid answer."""

    code = "tool_server_unavailable"


class PoolFull(SandboxError):
    """A container has no room for a lease right now (409 on the wire); the pool tries another."""

    code = "full"

    def __init__(self, message: str, *, room: Resources = NOTHING) -> None:
        super().__init__(message)
        self.room = room


class NotSupported(SandboxError):
    """The sandbox server doesn't do this, by configuration or by version; the message names it."""

    code = "not_supported"
    retryable = False


class ImageUnavailable(SandboxError):
    """An image can't be a slot's root: its pull failed, it is refused or finds no room; the message says where."""

    code = "image_unavailable"
    retryable = False


class InferenceError(Exception):
    """The inference server gave no usable answer: unreachable, refused, too late, or nonsense.

    Not the model's fault, so never a reward: like a `SandboxError` it drops or retries the trajectory.

    Attributes:
        status: the HTTP status, where there was one.
        retryable: whether asking again may help; False for 4xx.
        retry_after_s: how long the server asks to wait before that, in seconds.
    """

    code = "inference_error"

    def __init__(
        self, message: str, *, status: int | None = None, retryable: bool = True, retry_after_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class ConfigError(ValueError):
    """The programmer's or operator's mistake: names the field and what would be right."""


class LimitTooLarge(ConfigError):
    """A lease asks for more than any container has.

    Attributes:
        field: of `LeaseLimits`.
        asked: what was asked for.
        largest: what a container has.
    """

    def __init__(self, field: str, asked: float, largest: float, why: str) -> None:
        super().__init__(f"limits.{field}: {asked:.15g} asked for, the largest container has {largest:.15g} ({why})")
        self.field = field
        self.asked = asked
        self.largest = largest


BY_CODE: dict[str, type[SandboxError]] = {
    kind.code: kind
    for kind in (
        SandboxError,
        AcquireTimeout,
        SlotLost,
        LeaseExpired,
        OutcomeUnknown,
        BackendUnavailable,
        QuotaReached,
        IsolationUnavailable,
        ToolServerUnavailable,
        PoolFull,
        NotSupported,
        ImageUnavailable,
    )
}


def code_of(error: BaseException) -> str:
    """A failure's stable name, one of few: for metrics, what is no type of this module included."""
    if isinstance(error, SandboxError | InferenceError):
        return error.code
    import asyncio  # which half of a sandbox server's start does without

    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return "config_error" if isinstance(error, ConfigError) else "error"


def from_code(code: str, message: str) -> SandboxError:
    """The exception that a code on the wire stands for; an unknown code is a plain `SandboxError`."""
    return BY_CODE.get(code, SandboxError)(message)
