"""Prints the tables of settings in the docs, made from the models themselves.

python scripts/config_table.py           # print
python scripts/config_table.py --write   # put them into their pages, between the markers
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, SecretStr

DOCS = Path(__file__).resolve().parent.parent / "docs"
MARKED = re.compile(r"(<!-- (\S+) settings: begin -->\n).*?(\n<!-- \2 settings: end -->)", re.DOTALL)


def shown(value: Any) -> str:
    if isinstance(value, SecretStr):
        return "secret"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, BaseModel):
        return value.model_dump_json(exclude_defaults=True)
    return str(value)


def table(classes: Sequence[type[BaseModel]], seen: set[str]) -> str:
    """Every field that is ours, by the class that brings it in."""
    lines: list[str] = []
    for cls in classes:
        own = set(cls.__annotations__)
        new = {name: field for name, field in cls.model_fields.items() if name in own or name not in seen}
        seen |= set(new)
        if not new:
            continue
        lines += ["", f"**{cls.__name__}**", "", "| field | default | meaning |", "| --- | --- | --- |"]
        for name, field in new.items():
            default = "" if field.is_required() else f"`{shown(field.get_default(call_default_factory=True))}`"
            cells = (f"`{name}`", default.replace("|", "\\|"), (field.description or "").replace("|", "\\|"))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def tables() -> dict[str, str]:
    """The tables by the names in their markers."""
    from atropos.api.accounts.keys import KeySettings
    from atropos.api.accounts.secrets import SecretSettings
    from atropos.api.executor.models import ExecutorServerSettings
    from atropos.api.settings import Bounds, BrowserSettings, McpServerSettings, SearchSettings, ToolServerSettings
    from atropos.envs.adapter import BaseEnvConfig
    from atropos.envs.config import AgentEnvConfig, SandboxEnvConfig
    from atropos.envs.dataset_env import DatasetEnvConfig
    from atropos.envs.hermes.config import HermesAgentEnvConfig
    from atropos.envs.humaneval_env import HumanEvalEnvConfig
    from atropos.envs.task_settings import TaskEnvConfig
    from atropos.slots.config import Quotas

    env = (SandboxEnvConfig, AgentEnvConfig, DatasetEnvConfig, TaskEnvConfig, HumanEvalEnvConfig, HermesAgentEnvConfig)
    tool_server = (ToolServerSettings, Bounds, SearchSettings, BrowserSettings, McpServerSettings)
    return {
        "env": table(env, set(BaseEnvConfig.model_fields)),
        "tool-server": table(tool_server, set()),
        "executor-server": table((ExecutorServerSettings,), set()),
        "key": table((Quotas, KeySettings, SecretSettings), set()),
    }


def main() -> None:
    made = tables()
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        new = MARKED.sub(lambda found: f"{found[1]}{made[found[2]]}{found[3]}", text)
        if "--write" in sys.argv:
            page.write_text(new)
        elif "--check" in sys.argv and new != text:
            sys.exit(f"docs/{page.name} is behind the models: python scripts/config_table.py --write")
    if len(sys.argv) == 1:
        print("\n".join(made.values()))


if __name__ == "__main__":
    main()
