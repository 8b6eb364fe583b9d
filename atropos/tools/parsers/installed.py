"""vLLM's own parsers, where vLLM is installed: calls are then parsed as vLLM's server would parse them.

They are loaded by name from vLLM's registry, which has moved between its releases (both places are tried). Rendering,
the bound on calls, error messages (vLLM takes a malformed call for plain text) and parsers that a user registers stay
ours.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from atropos.tools.models import ToolCall
from atropos.tools.parsers.base import Collector, Format, Parsed, Parser, get_parser
from atropos.tools.parsers.shapes import tool_names

_PLACES = (
    ("vllm.tool_parsers", ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.protocol")),
    ("vllm.entrypoints.openai.tool_parsers", ("vllm.entrypoints.openai.protocol",)),
)
_log = logging.getLogger(__name__)


def parser_for(name: str, tokenizer: object, schemas: Sequence[dict[str, object]] = ()) -> Parser:
    """The parser of a format, for a model's tokenizer and the tools that it is offered.

    Raises:
        ConfigError: there is none of that name.
    """
    ours = get_parser(name)
    if not isinstance(ours, Format) or not type(ours).__module__.startswith("atropos.tools.parsers."):
        return ours
    if tools := tool_names(schemas):
        ours = ours.for_tools(tools)
    theirs = ours.vllm_name
    registry = None if theirs is None else vllm_registry()
    if registry is None:
        return ours
    manager, request_type = registry
    try:
        parser_type = manager.get_tool_parser(theirs)
        request = request_type(
            model="model", messages=[{"role": "user", "content": ""}], tools=list(schemas) or None, tool_choice="auto"
        )
        try:
            new_parser = functools.partial(parser_type, tokenizer, request.tools)
            new_parser()
        except TypeError:  # releases before tools were an argument
            new_parser = functools.partial(parser_type, tokenizer)
            new_parser()
    except Exception as error:  # foreign code: most often, the tokenizer lacks the format's tokens
        _log.info("vLLM's parser %s is not used: %s: %s", theirs, type(error).__name__, error)
        return ours
    return VllmParser(ours, new_parser, request)


@functools.cache
def vllm_registry() -> tuple[Any, Any] | None:
    """The registry of vLLM's parsers and its type of a chat request; None without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for place, protocols in _PLACES:
        for protocol in protocols:
            try:
                manager = importlib.import_module(place).ToolParserManager
                return manager, importlib.import_module(protocol).ChatCompletionRequest
            except (ImportError, AttributeError):
                continue
    _log.warning("vLLM is installed, but its tool parsers were not found: atropos' own are used")
    return None


class VllmParser(Parser):
    """One of vLLM's parsers behind our interface.

    Args:
        ours: our parser of the same format.
        new_parser: makes an instance of vLLM's class, which keeps state.
        request: a chat request with the tools, which give arguments their types.
    """

    def __init__(self, ours: Parser, new_parser: Callable[[], Any], request: Any) -> None:
        self.name = ours.name
        self._ours, self._new_parser, self._request = ours, new_parser, request

    def parse(self, text: str) -> Parsed:
        """As vLLM parses it; where vLLM fails, as our parser does."""
        own = self._ours.parse(text)
        try:
            extracted = self._new_parser().extract_tool_calls(text, request=self._request)
        except Exception:
            _log.warning("vLLM's parser %s failed on a turn; atropos' own is used", self.name, exc_info=True)
            return own
        if not extracted.tools_called:
            return own
        collector = Collector()
        for call in extracted.tool_calls:
            if collector.full(text):
                break
            collector.call(call.function.name, _arguments(call.function.arguments), call.function.arguments, call.id)
        parsed = collector.done()
        errors = own.errors if len(own.calls) == len(parsed.calls) else ()
        return Parsed((extracted.content or "").strip(), parsed.calls, (*parsed.errors, *errors))

    def render(self, call: ToolCall) -> str:
        """See `Parser`."""
        return self._ours.render(call)

    def render_turn(self, content: str, calls: Sequence[ToolCall]) -> str:
        """See `Parser`."""
        return self._ours.render_turn(content, calls)


def _arguments(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
