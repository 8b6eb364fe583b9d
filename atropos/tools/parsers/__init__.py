"""Parsers from a model's text to tool calls: one for each format, by name.

What begins a call is also known to `shapes`, for turns in which a format finds none, and to `atropos.thinking`, for
`<think>` tags within a call: both learn of a new format.
"""

from atropos.tools.parsers import hermes, llama, mistral, tagged, tokens
from atropos.tools.parsers.base import (
    Parsed,
    ParseError,
    Parser,
    get_parser,
    parser_names,
    register_parser,
)
from atropos.tools.parsers.installed import parser_for

for _module in (hermes, llama, mistral, tagged, tokens):
    for _parser in _module.PARSERS:
        register_parser(_parser)

__all__ = ["ParseError", "Parsed", "Parser", "get_parser", "parser_for", "parser_names", "register_parser"]
