"""scripts/engines.py, without an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import alive

ROOT = Path(__file__).resolve().parents[3]
SOON = "import sys; sys.path.insert(0, 'scripts'); import engines; engines.GRACE_S = 0.2; sys.exit(engines.main())"


def test_what_a_command_started_ends_with_it_even_if_it_is_killed_itself(tmp_path: Path) -> None:
    """As the workers of pytest do, and Nomad agents of the cluster's tests: in sessions of their own."""
    with subprocess.Popen(
        [sys.executable, "-c", SOON, "local", "sh", "-c", "setsid sleep 1000 >&- 2>&- & echo $!; exec sleep 1000"],
        cwd=ROOT,
        env=os.environ | {"ATROPOS_ENGINES_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as engines:
        assert engines.stdout is not None
        left = int(engines.stdout.readline())
        while (
            Path(f"/proc/{left}/cmdline").read_bytes()[:6] != b"sleep\0"
        ):  # until it has executed setsid, and that this
            time.sleep(0.01)
        engines.send_signal(signal.SIGTERM)
        _, said = engines.communicate(timeout=60)
    assert engines.returncode == 128 + signal.SIGTERM
    assert not alive([left]), said
    assert list(tmp_path.iterdir()) == []
