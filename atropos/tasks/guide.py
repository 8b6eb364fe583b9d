"""What a task has for the agent beside its instruction: skills in the workspace, and MCP servers."""

from __future__ import annotations

import asyncio
import posixpath
import re
from xml.sax.saxutils import escape

from atropos.slots import Slot
from atropos.tasks.builder.transfer import exec_plain
from atropos.tasks.format.files import parse_yaml
from atropos.tasks.format.task import Task

MAX_SKILLS = 200
MAX_SKILL_BYTES = 256 * 1024
_HEAD = re.compile(r"---\r?\n(.{,8192}?)\r?\n---", re.DOTALL)
"""Front matter: eight times what its longest field, the description, may be."""


async def guide(slot: Slot, task: Task) -> str:
    """What follows the instruction: each skill's name, description and file, and the MCP servers. Empty without any.

    A skill is a folder in `skills_dir` with a SKILL.md, whose front matter has both; the agent reads the file when it
    needs it (agentskills.io).
    """
    parts: list[str] = []
    wants = task.config.environment
    if wants.mcp_servers:
        servers = [
            f"- {one.name}: {one.transport}, {one.url or ' '.join((one.command or '', *one.args))}"
            for one in wants.mcp_servers
        ]
        parts.append("\n".join(["MCP servers of this task:", *servers]))
    skills = [] if wants.skills_dir is None else await _skills(slot, task, wants.skills_dir)
    if skills:
        parts.append("\n".join(["<available_skills>", *skills, "</available_skills>"]))
    return "".join(f"\n\n{part}" for part in parts)


async def _skills(slot: Slot, task: Task, folder: str) -> list[str]:
    folder = posixpath.join(task.recipe.workdir, folder)
    script = 'for f in "$D"/*/SKILL.md; do [ -f "$f" ] && printf "%s\\n" "$f"; done; :'
    listed = await exec_plain(slot, script, user="0", D=folder)
    skills: list[str] = []
    for path in listed.output.splitlines()[:MAX_SKILLS]:
        try:
            text = (await slot.read_file(path, max_bytes=MAX_SKILL_BYTES)).decode(errors="replace")
        except OSError:
            continue
        head = await asyncio.to_thread(_front_matter, text)
        if head is not None:
            name, about = head
            skills.append(
                f"<skill><name>{escape(name)}</name><description>{escape(about)}</description>"
                f"<location>{escape(path)}</location></skill>"
            )
    return skills


def _front_matter(text: str) -> tuple[str, str] | None:
    """A skill's name and description; None where it doesn't say them."""
    head = _HEAD.match(text)
    try:
        fields = parse_yaml(head[1]) if head else None
    except ValueError:
        return None
    match fields:
        case {"name": str() | int() | float() as name, "description": str() | int() | float() as about}:
            return str(name), " ".join(str(about).split())
        case _:
            return None
