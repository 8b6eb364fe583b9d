"""Values of a JSON record, any of which may be of another kind than it should be."""

from __future__ import annotations

import json
import math
from typing import cast


def as_dict(value: object) -> dict[str, object]:
    """An object; an empty one for anything else."""
    return cast("dict[str, object]", value) if isinstance(value, dict) else {}


def as_list(value: object) -> list[object]:
    """A list; an empty one for anything else."""
    return cast("list[object]", value) if isinstance(value, list) else []


def as_text(value: object) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def finite(value: object) -> float:
    """A number; 0 for anything else, and for one that no float holds."""
    try:
        number = float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:
        return 0.0
    return number if math.isfinite(number) else 0.0
