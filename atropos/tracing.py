"""OpenTelemetry traces over OTLP/HTTP: off until `start`, and then for the whole process. Needs `atropos[otel]`.

Spans carry names, ids, counts and codes: never a call's arguments, a result, a prompt or an error's text. Names and
attributes follow OpenTelemetry's semantic conventions for generative AI (`invoke_agent`, `chat`, `execute_tool`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from atropos.errors import ConfigError, code_of
from atropos.metrics import installed_version

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

EXPORT_S = 5.0
"""Longest that one export, and the last one at the end, may take."""

_tracer: Tracer | None = None
"""OpenTelemetry's; None while traces are off."""


class Tracing:
    """What `start` began; `close` sends what is left and turns traces off."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider: TracerProvider | None = provider

    def close(self) -> None:
        """Send what is left, for `EXPORT_S` at most. Blocks; idempotent."""
        global _tracer  # noqa: PLW0603
        provider, self._provider = self._provider, None
        if provider is not None:
            _tracer = None
            provider.force_flush(int(EXPORT_S * 1000))
            provider.shutdown()


def start(endpoint: str, service: str) -> Tracing:
    """Send this process's spans to an OTLP/HTTP collector.

    Args:
        endpoint: its base URL, as http://127.0.0.1:4318. Headers come from OTEL_EXPORTER_OTLP_HEADERS, as everywhere.
        service: the resource's `service.name`.

    Raises:
        ConfigError: the endpoint is no URL, the extra is not installed, or this process sends spans already.
    """
    global _tracer  # noqa: PLW0603
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_endpoint: {endpoint!r} is no URL; write http://host:port")
    if _tracer is not None:
        raise ConfigError("otlp_endpoint: this process already sends its spans")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"otlp_endpoint: install atropos[otel] ({error})") from None
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("atropos", installed_version())
    return Tracing(provider)


class Span:
    """One span, as a context manager; without tracing, its attributes are discarded."""

    __slots__ = ("_scope", "_span")

    def __init__(self, scope: contextlib.AbstractContextManager[OtelSpan] | None = None) -> None:
        self._scope = scope
        self._span: OtelSpan | None = None

    def set(self, **attributes: str | float | bool) -> None:
        """Add attributes; a double underscore stands for a dot."""
        if self._span is not None:
            self._span.set_attributes({name.replace("__", "."): value for name, value in attributes.items()})

    def fail(self, kind: str) -> None:
        """Mark it as failed: `error.type`, one of a small fixed set."""
        if self._span is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_attribute("error.type", kind)
            self._span.set_status(Status(StatusCode.ERROR))

    def __enter__(self) -> Self:
        if self._scope is not None:
            self._span = self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scope is not None:
            if error is not None:
                self.fail(code_of(error))
            self._scope.__exit__(None, None, None)  # the error's text stays out of the span


_OFF = Span()


def span(
    name: str, kind: Literal["internal", "client", "server"] = "internal", **attributes: str | float | bool
) -> Span:
    """A span around what follows, child of the one around it. Attributes as for `Span.set`.

    Returns one shared object that does nothing while traces are off.
    """
    if _tracer is None:
        return _OFF
    from opentelemetry.trace import SpanKind

    dotted = {key.replace("__", "."): value for key, value in attributes.items()}
    return Span(
        _tracer.start_as_current_span(
            name, kind=SpanKind[kind.upper()], attributes=dotted, record_exception=False, set_status_on_exception=False
        )
    )


def traceparent() -> str | None:
    """The W3C `traceparent` of the current span; None while traces are off or outside any span."""
    if _tracer is None:
        return None
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def joined(parent: str, name: str, waited_s: float, ran_s: float) -> None:
    """A span that another process measured and reported: it ended about now.

    Args:
        parent: the `traceparent` that was sent there.
        name: the span's.
        waited_s: how long it waited in line there, before it ran.
        ran_s: how long it ran.
    """
    if _tracer is None:
        return
    from opentelemetry.trace import SpanKind

    end = time.time_ns()
    started = end - int((waited_s + ran_s) * 1e9)
    span = _tracer.start_span(
        name,
        context=_context(parent),
        kind=SpanKind.SERVER,
        start_time=started,
        attributes={"atropos.waited_s": waited_s, "atropos.ran_s": ran_s},
    )
    span.end(end)


@contextlib.contextmanager
def continued(parent: str | None) -> Generator[None]:
    """Around work for a caller who sent a `traceparent` header: its spans join the caller's trace."""
    if _tracer is None or parent is None:
        yield
        return
    from opentelemetry import context

    token = context.attach(_context(parent))
    try:
        yield
    finally:
        context.detach(token)


def _context(parent: str) -> Context:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent})
