"""A model's arguments: from what it wrote to a checked object, or to a message that says what would be right."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

MAX_ARGUMENT_BYTES = 8 * 1024 * 1024
"""Longest JSON text of a call's arguments that is parsed at all, in bytes."""
MAX_ARGUMENTS = 1000
"""Most arguments of one call: each wrong one adds to the message."""
MAX_DEPTH = 64
"""Levels that a model's arguments may be nested."""
_SHOWN = 120
"""Characters of a model's text that a message repeats."""
_T = TypeVar("_T")
_Model = TypeVar("_Model", bound=BaseModel)
JsonSchema = dict[str, Any]
"""As pydantic makes it."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A length of time that a model may ask for."""


class FrozenModel(BaseModel):
    """Frozen, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Arguments(FrozenModel):
    """Base of a tool's arguments: an unknown one is refused by name."""


class BadArguments(Exception):
    """The model's arguments are wrong; the message says what would be right."""


def _without_nul(value: str) -> str:
    if "\x00" in value:
        raise ValueError("it holds a NUL character; leave it out")
    return value


NO_NUL = AfterValidator(_without_nul)
"""For what no path or command can hold."""
Text = Annotated[str, NO_NUL]


def parse_object(tool: str, arguments: dict[str, object] | str) -> dict[str, object]:
    """The arguments as an object.

    Raises:
        BadArguments: they are not a JSON object.
    """
    if isinstance(arguments, dict):
        return arguments
    if not arguments.strip():
        return {}
    if len(arguments) > MAX_ARGUMENT_BYTES:
        raise BadArguments(f"{tool}: the arguments are {len(arguments):,} characters; at most {MAX_ARGUMENT_BYTES:,}")
    value: object = arguments
    for _ in range(2):  # some models encode the object twice
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value, strict=False)
        except (ValueError, RecursionError) as error:
            raise BadArguments(
                f"{tool}: the arguments are not valid JSON ({_json_error(error)}); "
                'write one JSON object, such as {"name": "value"}'
            ) from None
    if not isinstance(value, dict):
        raise BadArguments(f"{tool}: the arguments must be a JSON object, not {json_kind(value)}")
    return cast("dict[str, object]", value)


def coerce(arguments: dict[str, object], schema: JsonSchema) -> dict[str, object]:
    """Parse text as JSON where the schema wants another type: some formats have no types, some models quote everything.

    What can't be parsed stays as it is; `check` refuses it.
    """
    properties = _object(schema.get("properties"))
    definitions = _object(schema.get("$defs", schema.get("definitions")))
    changed: dict[str, object] = {}
    for name, value in arguments.items():
        if not isinstance(value, str) or name not in properties or len(value) > MAX_ARGUMENT_BYTES:
            continue
        types = _types(properties[name], definitions)
        if not types or "string" in types:
            continue
        text = {"True": "true", "False": "false", "None": "null"}.get(value.strip(), value)
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(read, str):
            changed[name] = read
    return {**arguments, **changed} if changed else arguments


def _object(value: object) -> dict[str, object]:
    """A part of a schema that should be an object; an MCP server's may be anything."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _types(field: object, definitions: dict[str, object], within: frozenset[str] = frozenset()) -> set[str]:
    """The types that a field may have, as far as its schema says; of a choice, whether there is text among it."""
    node = _object(field)
    if "enum" in node or "const" in node:
        allowed = _list(node.get("enum")) or [node.get("const")]
        return {"string" if any(isinstance(one, str) for one in allowed) else "number"}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference not in within:
        return _types(definitions.get(reference.rsplit("/", 1)[-1]), definitions, within | {reference})
    kind = node.get("type")
    types = {one for one in (kind, *_list(kind)) if isinstance(one, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for option in _list(node.get(key)):
            types |= _types(option, definitions, within) or {"string"}
    return types


def check(tool: str, model: type[_Model], arguments: dict[str, object]) -> _Model:
    """The arguments as the tool's own model.

    Raises:
        BadArguments: with every field that is wrong, and what the tool takes.
    """
    check_encodable(tool, arguments)
    if len(arguments) > MAX_ARGUMENTS:
        raise BadArguments(f"{tool}: {len(arguments):,} arguments are too many. {usage(tool, model)}")
    try:
        return model.model_validate(arguments)
    except ValidationError as error:
        problems = [_problem(model, detail) for detail in error.errors(include_url=False)[:10]]
        raise BadArguments(f"{tool}: {'; '.join(problems)}. {usage(tool, model)}") from None
    except RecursionError:
        raise BadArguments(f"{tool}: the arguments are nested too deeply. {usage(tool, model)}") from None


def has_lone_surrogate(value: object) -> bool:
    """Whether a string in a JSON value has half of a surrogate pair, which JSON can express and UTF-8 can't."""
    if isinstance(value, str):
        if value.isascii():
            return False
        try:
            value.encode()
        except UnicodeEncodeError:
            return True
    elif isinstance(value, dict):
        return any(
            map(has_lone_surrogate, (item for pair in cast("dict[object, object]", value).items() for item in pair))
        )
    elif isinstance(value, list | tuple):
        return any(map(has_lone_surrogate, cast("Sequence[object]", value)))
    return False


def replace_surrogates(value: _T) -> _T:
    """A JSON value with '?' for each half of a surrogate pair in its strings."""
    replaced: object = value
    if isinstance(value, str):
        replaced = value if value.isascii() else value.encode("utf-8", "replace").decode()
    elif isinstance(value, dict):
        pairs = cast("dict[object, object]", value).items()
        replaced = {replace_surrogates(key): replace_surrogates(one) for key, one in pairs}
    elif isinstance(value, list | tuple):
        replaced = [replace_surrogates(one) for one in cast("Sequence[object]", value)]
    return cast("_T", replaced)


def check_encodable(tool: str, arguments: dict[str, object]) -> None:
    """Refuse what can't be sent: lone surrogates, and deep nesting.

    Raises:
        BadArguments: names the argument.
    """
    if too_deep(arguments):
        raise BadArguments(f"{tool}: the arguments are nested more than {MAX_DEPTH} levels deep")
    for name, value in arguments.items():
        if has_lone_surrogate(value) or has_lone_surrogate(name):
            raise BadArguments(
                f"{tool}: {shorten(ascii(name))} is wrong: it holds half of a surrogate pair (\\ud800 to \\udfff), "
                "which is no character"
            )


def too_deep(value: object) -> bool:
    """Whether a JSON value is nested deeper than `MAX_DEPTH` levels."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for one in level:
            if isinstance(one, dict):
                inner += cast("dict[str, object]", one).values()
            elif isinstance(one, list | tuple):
                inner += cast("Sequence[object]", one)
        if not inner:
            return False
        level = inner
    return True


def usage(tool: str, model: type[BaseModel]) -> str:
    """One line: the arguments a tool takes, with types."""
    parts: list[str] = []
    schema = parameters(model)
    required = set(schema.get("required", ()))
    for name, field in schema["properties"].items():
        kind = field.get("type") or "/".join(str(one.get("type", "object")) for one in field.get("anyOf", ())) or "any"
        if "enum" in field:
            kind = "one of " + ", ".join(json.dumps(value) for value in field["enum"])
        parts.append(f"{name} ({kind}{', required' if name in required else ''})")
    return f"{tool} takes: {', '.join(parts)}" if parts else f"{tool} takes no arguments"


def parameters(model: type[BaseModel]) -> JsonSchema:
    """A pydantic model as the JSON schema that models are shown: no titles, `None` not offered, references resolved."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    shown = _simplify(schema, definitions, frozenset())
    shown.setdefault("properties", {})
    shown.pop("description", None)
    return shown


def _simplify(node: object, definitions: JsonSchema, within: frozenset[str]) -> Any:
    if isinstance(node, list):
        return [_simplify(one, definitions, within) for one in cast("list[object]", node)]
    if not isinstance(node, dict):
        return node
    fields = cast("JsonSchema", node)
    if "$ref" in fields:
        name = str(fields["$ref"]).rsplit("/", 1)[-1]
        target = definitions.get(name, {}) if name not in within else {}  # a model within itself is shown once
        merged = {**target, **{key: value for key, value in fields.items() if key != "$ref"}}
        return _simplify(merged, definitions, within | {name})
    result: JsonSchema = {}
    for key, value in fields.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "properties":
            result[key] = {name: _simplify(one, definitions, within) for name, one in value.items()}
        elif not (key == "default" and value is None):
            result[key] = _simplify(value, definitions, within)
    options = [one for one in result.get("anyOf", ()) if one.get("type") != "null"]
    if len(options) == 1 and len(result["anyOf"]) == 2:
        del result["anyOf"]
        result = {**options[0], **result}
    return result


def _problem(model: type[BaseModel], detail: ErrorDetails) -> str:
    where = ".".join(str(part) for part in detail["loc"]) or "the arguments"
    kind, value = detail["type"], detail.get("input")
    if kind == "missing":
        return f"'{where}' is missing"
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(where, list(model.model_fields), n=1, cutoff=0.6)
        hint = f" (did you mean '{close[0]}'?)" if close else ""
        return f"'{shorten(where)}' is not an argument{hint}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"'{where}' is wrong: {message} (got {shorten(describe(value))})"


def describe(value: object) -> str:
    """A value as ASCII JSON; where that fails, the name of its type."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def shorten(text: str) -> str:
    """The start of a text, for a message."""
    clean = text.encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= _SHOWN else f"{clean[:_SHOWN]}… ({len(clean):,} characters)"


def json_kind(value: object) -> str:
    """The JSON type of a value, with its article."""
    kinds: dict[type, str] = {bool: "a boolean", str: "a string", int: "a number", float: "a number", list: "a list"}
    return "null" if value is None else kinds.get(type(value), "an object")


def _json_error(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)[:_SHOWN]
