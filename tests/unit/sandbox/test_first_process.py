"""What PID 1 of a slot needs before it is one: its modules, and the program that waits where its root is made."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

from atropos.sandbox.linux import pause_program
from atropos.sandbox.programs import runner


def test_imports_at_its_start():
    """In a slot there is nothing to import from: such an operation would fail."""
    files = sorted(Path(runner.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    for file in files:
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        late = [
            node
            for function in functions
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not late, f"{file}: line {late[0].lineno}"


def test_the_pausing_program_waits(tmp_path):
    program = tmp_path / "pause"
    program.write_bytes(pause_program.elf())
    program.chmod(0o755)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}) as process:
        try:
            assert os.read(process.stdout.fileno(), 10) == pause_program.PAUSED
            assert process.poll() is None
            assert ".so" not in Path(f"/proc/{process.pid}/maps").read_text()
            process.stdin.close()
            assert process.wait(20) == 0
        finally:
            process.kill()
