"""Parsers from a model's text to tool calls: one for each format, by name."""

from atropos.tools.parsers.base import (
    Parsed,
    ParseError,
    Parser,
    get_parser,
    parser_names,
    register_parser,
)
from atropos.tools.parsers.hermes import HermesParser
from atropos.tools.parsers.installed import parser_for
from atropos.tools.parsers.llama import Llama3JsonParser, Llama4PythonicParser
from atropos.tools.parsers.mistral import MistralParser
from atropos.tools.parsers.tagged import Glm45Parser, Qwen3CoderParser
from atropos.tools.parsers.tokens import DeepSeekV3Parser, DeepSeekV31Parser, KimiK2Parser

for _parser in (
    HermesParser("hermes"),
    HermesParser("qwen"),
    MistralParser(),
    Llama3JsonParser(),
    Llama4PythonicParser(),
    Qwen3CoderParser(),
    DeepSeekV3Parser(),
    DeepSeekV31Parser(),
    Glm45Parser(),
    KimiK2Parser(),
):
    register_parser(_parser)

__all__ = ["ParseError", "Parsed", "Parser", "get_parser", "parser_for", "parser_names", "register_parser"]
