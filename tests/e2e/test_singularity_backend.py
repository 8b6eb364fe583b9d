"""What Singularity adds to a pool: what it refuses, and the terminal backend of a Hermes env."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos.envs import HermesAgentEnvConfig
from atropos.errors import ConfigError
from atropos.slots import SlotPool, SlotPoolConfig
from tests.apptainer import REAL, apptainer


async def refusal(**settings) -> str:
    with pytest.raises(ConfigError) as caught:
        await SlotPool(SlotPoolConfig(backend="singularity", **settings)).start()
    return str(caught.value)


async def test_missing_ones_are_named(tmp_path, monkeypatch):
    with apptainer(tmp_path) as image:
        assert "atropos-sandbox.sif" in await refusal()
        assert "there is no /nowhere.sif; `make sif` builds one" in await refusal(image="/nowhere.sif")
        assert "base: " in await refusal(image=image, base="/nowhere")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "neither is on PATH" in await refusal(image=image)


async def test_hermes_terminal_backend(tmp_path, monkeypatch):
    with apptainer(tmp_path) as where:
        monkeypatch.chdir(Path(where).parent)
        image = Path(where).name
        config = HermesAgentEnvConfig(terminal_backend="singularity", sandbox_image=image, slots_per_container=2)
        async with SlotPool(config.pool_config()) as pool, pool.lease("t") as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"


@pytest.mark.skipif(REAL is None, reason="needs apptainer or singularity, and ATROPOS_SIF with the image of `make sif`")
async def test_slots_start_from_the_image():
    async with SlotPool(SlotPoolConfig(backend="singularity", image=REAL)) as pool, pool.lease("t") as slot:
        assert (await slot.exec("test -e /etc/debian_version && echo image")).output == "image\n"
