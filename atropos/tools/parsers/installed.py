"""vLLM's own parsers, where vLLM is installed: a turn's calls are then read as its server would read them.

They are loaded by name from vLLM's registry, which has moved between its releases (both places are tried). What stays
ours: rendering, the bound on calls, errors that the model can read (vLLM takes a malformed call for plain text), and
whatever a user has registered under a name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
from collections.abc import Sequence
from typing import Any

from atropos.tools.models import ToolCall
from atropos.tools.parsers.base import Collector, Parsed, Parser, get_parser

THEIRS = {
    "hermes": "hermes",
    "qwen": "hermes",
    "mistral": "mistral",
    "llama3_json": "llama3_json",
    "llama4_pythonic": "llama4_pythonic",
    "qwen3_coder": "qwen3_coder",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v3_1": "deepseek_v31",
    "glm45": "glm45",
    "kimi_k2": "kimi_k2",
}
"""Our names of formats, and vLLM's."""

_PLACES = (
    ("vllm.tool_parsers", ("vllm.entrypoints.openai.chat_completion.protocol", "vllm.entrypoints.openai.protocol")),
    ("vllm.entrypoints.openai.tool_parsers", ("vllm.entrypoints.openai.protocol",)),
)
_log = logging.getLogger(__name__)


def parser_for(name: str, tokenizer: Any, schemas: Sequence[dict[str, object]] = ()) -> Parser:
    """The parser of a format for a model with this tokenizer that is offered these tools.

    Raises:
        ConfigError: there is none of that name.
    """
    ours = get_parser(name)
    registry = _registry() if type(ours).__module__.startswith("atropos.tools.parsers.") and name in THEIRS else None
    if registry is None:
        return ours
    manager, request_type = registry
    try:
        made = manager.get_tool_parser(THEIRS[name])
        request = request_type(
            model="model", messages=[{"role": "user", "content": ""}], tools=list(schemas) or None, tool_choice="auto"
        )
        parser = VllmParser(ours, made, tokenizer, request)
        parser.begin()
    except Exception as error:  # of somebody else's code: a tokenizer without the format's tokens, above all
        _log.info("vLLM's parser %s is not used: %s: %s", THEIRS[name], type(error).__name__, error)
        return ours
    return parser


@functools.cache
def _registry() -> tuple[Any, Any] | None:
    """The registry of parsers, and the type of a chat request, or None where there is no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for place, protocols in _PLACES:
        for protocol in protocols:
            try:
                manager = importlib.import_module(place).ToolParserManager
                return manager, importlib.import_module(protocol).ChatCompletionRequest
            except (ImportError, AttributeError):
                continue
    _log.warning("vLLM is installed, but its tool parsers are not where they are looked for: atropos' own are used")
    return None


class VllmParser(Parser):
    """One of vLLM's parsers behind our interface.

    Args:
        ours: the parser of the same format here.
        made: vLLM's class.
        tokenizer: the model's.
        request: a chat request with the tools, which types of arguments follow.
    """

    def __init__(self, ours: Parser, made: Any, tokenizer: Any, request: Any) -> None:
        self.name = ours.name
        self._ours, self._made, self._tokenizer, self._request = ours, made, tokenizer, request

    def begin(self) -> Any:
        """A new one of theirs: they keep a state."""
        try:
            return self._made(self._tokenizer, self._request.tools)
        except TypeError:  # releases before tools were an argument
            return self._made(self._tokenizer)

    def parse(self, text: str) -> Parsed:
        """As vLLM reads it; what it can't read as our parser does."""
        own = self._ours.parse(text)
        try:
            found = self.begin().extract_tool_calls(text, request=self._request)
        except Exception:
            _log.warning("vLLM's parser %s failed on a turn; read by atropos' own", self.name, exc_info=True)
            return own
        if not found.tools_called:
            return own if own.errors else Parsed(text.strip())
        collector = Collector()
        for call in found.tool_calls:
            if collector.full(text):
                break
            collector.call(call.function.name, _arguments(call.function.arguments), call.function.arguments)
        taken = collector.done()
        errors = own.errors if len(own.calls) == len(taken.calls) else ()
        return Parsed((found.content or "").strip(), taken.calls, (*taken.errors, *errors))

    def render(self, call: ToolCall) -> str:
        """As ours."""
        return self._ours.render(call)

    def render_turn(self, content: str, calls: Sequence[ToolCall]) -> str:
        """As ours."""
        return self._ours.render_turn(content, calls)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
