"""Wrong arguments of the methods of slots and pools, as the project's own error."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import wraps
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from atropos.errors import ConfigError
from atropos.wire.base import one_line

P = ParamSpec("P")
T = TypeVar("T")
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


def named_if_wrong(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, CoroutineType[Any, Any, T]]:
    """A method that raises `ConfigError`, with the argument's name, if an argument's value or type is refused."""

    @wraps(method)
    async def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except ValidationError as error:
            raise ConfigError(one_line(error)) from None
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            if wrong := _wrong_types(method, args, kwargs):
                raise ConfigError("; ".join(wrong)) from error
            raise

    return checked


def check_seconds(name: str, seconds: float) -> float:
    """An argument that is a time.

    Raises:
        ConfigError: it is negative, or no number.
    """
    if not seconds >= 0:  # nor is NaN
        raise ConfigError(f"{name}: write seconds, 0 or more (got {seconds:g})")
    return seconds


def _wrong_types(method: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[str]:
    """Which arguments are not what their annotations say; asked once something failed, so that calls pay nothing."""
    signature, names = inspect.signature(method), vars(sys.modules[method.__module__])
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError:  # as Python itself says
        return []
    wrong: list[str] = []
    for name, value in arguments.items():
        annotation = signature.parameters[name].annotation
        with contextlib.suppress(NameError, TypeError, PydanticUserError):  # an annotation that can't be asked
            kind = eval(annotation, names) if isinstance(annotation, str) else annotation  # noqa: S307
            foreign = isinstance(value, Mapping) and not isinstance(value, dict)  # pydantic refuses os.environ
            if kind is inspect.Parameter.empty or foreign:
                continue
            try:
                # strict: "5" is no number for a method, which would not convert it either.
                parsed = TypeAdapter(kind, config=_ANY_CLASS).validate_python(value, strict=True)
                if isinstance(parsed, BaseModel) and parsed is not value:  # made of a dict, which the method doesn't do
                    wrong.append(f"{name}: write a {type(parsed).__name__} (got {type(value).__name__})")
            except ValidationError as error:
                messages = dict.fromkeys(f"{each['msg'][:1].lower()}{each['msg'][1:]}" for each in error.errors())
                wrong.append(f"{name}: {', or '.join(messages)} (got {type(value).__name__})")
    return wrong
