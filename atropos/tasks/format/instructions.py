"""The instructions of a Dockerfile, with the here-documents of ONBUILD, which the parser doesn't look for."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from e2b_dockerfile_utils import DockerfileAst, DockerfileInstruction, parse_dockerfile_ast

_ONBUILD = re.compile(r"\s*ONBUILD(?=\s+(?:ADD|COPY|RUN)\s.*<<)", re.IGNORECASE)


def read(text: str) -> DockerfileAst:
    """The instructions of a Dockerfile.

    Raises:
        DockerfileSyntaxError: there is a line that is none.
    """
    lines = text.split("\n")
    numbers = {number for number, line in enumerate(lines, 1) if _ONBUILD.match(line)}
    ast = _bare(lines, numbers)
    starts = {instruction.start_line for instruction in ast.instructions}
    if not numbers <= starts:  # one is a line of another here-document
        numbers &= starts
        ast = _bare(lines, numbers)
    expanded = [_with_onbuild(each) if each.start_line in numbers else each for each in ast.instructions]
    return replace(ast, instructions=expanded)


def _bare(lines: Sequence[str], numbers: Collection[int]) -> DockerfileAst:
    """The instructions, where those of these lines lack their ONBUILD."""
    bare = (_ONBUILD.sub("", line, count=1) if number in numbers else line for number, line in enumerate(lines, 1))
    return parse_dockerfile_ast("\n".join(bare))


def _with_onbuild(instruction: DockerfileInstruction) -> DockerfileInstruction:
    return replace(instruction, name="ONBUILD", original=f"ONBUILD {instruction.original}")


def trigger(instruction: DockerfileInstruction) -> str:
    """What an ONBUILD says, as images keep it."""
    documents = (f"\n{each.content}{each.name}" for each in instruction.heredocs)
    return "".join((instruction.original.split(maxsplit=1)[-1], *documents))
