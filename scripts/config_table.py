"""Prints the configuration table of docs/environments.md, made from the models themselves.

python scripts/config_table.py           # print
python scripts/config_table.py --write   # put it into the page, between the markers
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

PAGE = Path(__file__).resolve().parent.parent / "docs" / "environments.md"
BEGIN, END = "<!-- config table: begin -->", "<!-- config table: end -->"


def shown(value: Any) -> str:
    if isinstance(value, SecretStr):
        return "secret"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, BaseModel):
        return value.model_dump_json(exclude_defaults=True)
    return str(value)


def table() -> str:
    """Every field that is ours, by the class that brings it in."""
    from atropos.envs.adapter import BaseEnvConfig
    from atropos.envs.config import AgentEnvConfig, SandboxEnvConfig
    from atropos.envs.dataset_env import DatasetEnvConfig
    from atropos.envs.hermes.config import HermesAgentEnvConfig
    from atropos.envs.humaneval_env import HumanEvalEnvConfig
    from atropos.envs.task_env import TaskEnvConfig

    classes: list[type[BaseModel]] = [
        SandboxEnvConfig,
        AgentEnvConfig,
        DatasetEnvConfig,
        TaskEnvConfig,
        HumanEvalEnvConfig,
        HermesAgentEnvConfig,
    ]
    theirs = set(BaseEnvConfig.model_fields)
    seen = set(theirs)
    lines: list[str] = []
    for cls in classes:
        own = set(cls.__annotations__)
        new = {name: field for name, field in cls.model_fields.items() if name in own or name not in seen}
        seen |= set(new)
        if not new:
            continue
        lines += ["", f"**{cls.__name__}**", "", "| field | default | meaning |", "| --- | --- | --- |"]
        for name, field in new.items():
            default = shown(field.get_default(call_default_factory=True)).replace("|", "\\|")
            lines.append(f"| `{name}` | `{default}` | {(field.description or '').replace('|', chr(92) + '|')} |")
    return "\n".join(lines).strip()


def main() -> None:
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page = f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"
    if "--check" in sys.argv:
        if page != text:
            sys.exit("docs/environments.md is behind the models: python scripts/config_table.py --write")
    elif "--write" in sys.argv:
        PAGE.write_text(page)
    else:
        print(table())


if __name__ == "__main__":
    main()
