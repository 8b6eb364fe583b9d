"""Wrong arguments of a slot's methods, as the project's own error."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from types import CoroutineType
from typing import Any, ParamSpec, TypeVar

from pydantic import ValidationError

from atropos.config import one_line
from atropos.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


def named_if_wrong(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, CoroutineType[Any, Any, T]]:
    """A method that raises `ConfigError`, with the argument's name, if its operation refuses an argument's value."""

    @wraps(method)
    async def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except ValidationError as error:
            raise ConfigError(one_line(error)) from None

    return checked
