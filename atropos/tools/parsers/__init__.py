"""From a model's text to tool calls: one parser a format, by name."""

from atropos.tools.parsers.base import (
    Parsed,
    ParseError,
    Parser,
    get_parser,
    parser_names,
    register_parser,
)
from atropos.tools.parsers.hermes import HermesParser

register_parser(HermesParser("hermes"))
register_parser(HermesParser("qwen"))

__all__ = ["ParseError", "Parsed", "Parser", "get_parser", "parser_names", "register_parser"]
