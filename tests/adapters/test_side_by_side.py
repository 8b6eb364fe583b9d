"""Commands of one environment run side by side in every host, as they do in its own Docker environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.peers import BIN, HOSTS, NEMO_GYM, VERIFIERS, needs, run

PEERS = {
    "harbor": (BIN, "harbor"),
    "inspect_ai": (BIN, "inspect"),
    "mini_swe_agent": (BIN, "mini-extra"),
    "nemo_gym": (NEMO_GYM, "gym"),
    "swerex": (BIN, "swerex-remote"),
    "verifiers": (VERIFIERS, "vf-eval"),
}


@pytest.mark.parametrize("host", [pytest.param(name, marks=needs(one, where)) for name, (where, one) in PEERS.items()])
def test_a_command_is_answered_while_another_waits_for_it(tmp_path: Path, host: str) -> None:
    where, _ = PEERS[host]
    variables = {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path)}
    output = run("python", HOSTS / "side_by_side.py", host, folder=tmp_path, where=where, **variables)
    assert "42" in output.splitlines(), output
