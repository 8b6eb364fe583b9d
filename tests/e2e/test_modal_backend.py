"""What Modal adds to a pool: its refusals, what its sandboxes are asked for with, and that the stand-in is like it."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal

import modal as sdk
import pytest
from grpclib.exceptions import StreamTerminatedError
from modal import exception

from atropos.envs import HermesAgentEnvConfig
from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.backends.modal.server import LIFETIME_S
from atropos.slots.backends.spec import CONTAINER_PORT
from tests.engines import SMALL
from tests.modal_stand_in import KILLED, modal
from tests.processes import descendants, gone_within
from tests.settings import shows
from tests.waiting import until

IMAGE = "registry.example/atropos-sandbox:test"


def settings(**changes) -> SlotPoolConfig:
    values = {"backend": "modal", "image": IMAGE, "job_id": "a-job", "slots_per_container": 2, "limits": SMALL}
    return SlotPoolConfig(**(values | changes))


@shows("modal_cpus")
async def test_has_the_pool_s_settings():
    others = set(descendants())
    with modal() as stand_in:
        async with SlotPool(settings(modal_cpus=2.5, container_memory_mib=900)) as pool, pool.lease("t") as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"
        (asked,), (name,) = stand_in.asked, stand_in.created
    assert asked["image"].name == IMAGE
    assert asked == {
        "app": "app a-job",
        "image": asked["image"],
        "tags": {"atropos": name},
        "cpu": 2.5,
        "memory": (900, 900),
        "timeout": LIFETIME_S,
        "encrypted_ports": [CONTAINER_PORT],
        "runtime": "vm",
    }
    assert await gone_within(20, but=others) == []


@pytest.mark.parametrize(
    ("refusal", "error", "said"),
    [
        (exception.AuthError("Token missing.\nCould not authenticate"), ConfigError, "modal token new"),
        (exception.NotFoundError("no such image"), ConfigError, "Modal refused the sandbox: no such image"),
        (exception.ConnectionError("no route"), BackendUnavailable, "Modal: no route"),
        (StreamTerminatedError("Connection lost"), BackendUnavailable, "Modal: Connection lost"),
    ],
)
async def test_modals_refusal_is_one_line(refusal, error, said):
    with modal() as stand_in:
        stand_in.refusal = refusal
        with pytest.raises(error) as caught:
            await SlotPool(settings(start_timeout_s=5)).start()
    assert said in str(caught.value) and "\n" not in str(caught.value)


async def test_refusals_are_named():
    with modal(), pytest.raises(ConfigError, match=r"in Modal's sandbox: .*base: "):
        await SlotPool(settings(base="/nowhere")).start()
    with pytest.raises(ConfigError, match=r"image \(an env's sandbox_image\): Modal pulls it from a registry"):
        await SlotPool(SlotPoolConfig(backend="modal")).start()


async def test_cancelled_start_is_tidy():
    others = set(descendants())
    with modal() as stand_in:
        starting = asyncio.create_task(SlotPool(settings()).start())
        await until(lambda: stand_in.asked, "a sandbox that is being made")
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert await gone_within(20, but=others) == []


async def test_an_outage_costs_no_lease():
    others = set(descendants())
    with modal() as stand_in:
        async with SlotPool(settings(acquire_timeout_s=60)) as pool:
            (sandbox,) = stand_in.created.values()
            slot = await pool.acquire("t")
            sandbox.unanswered.set()
            await until(lambda: sandbox.asked >= 2, "another try")
            assert (await slot.exec("echo still here")).output == "still here\n"
            assert list(pool.links) == [slot.container]
            sandbox.process.kill()
            async with pool.lease("u") as other:
                assert (await other.exec("echo ok")).output == "ok\n"
        assert len(stand_in.created) == 2
    assert await gone_within(20, but=others) == []


async def test_hanging_sandbox_is_ended():
    others = set(descendants())
    with modal() as stand_in:
        async with SlotPool(settings()):
            (sandbox,) = stand_in.created.values()
            sandbox.process.send_signal(signal.SIGSTOP)
            sandbox.termination_s = 2.0
        assert sandbox.returncode == KILLED
    assert await gone_within(5, but=others) == []


async def test_hermes_terminal_backend():
    config = HermesAgentEnvConfig(terminal_backend="modal", sandbox_image=IMAGE, slots_per_container=2)
    with modal():
        async with SlotPool(config.pool_config()) as pool, pool.lease("t") as slot:
            assert (await slot.exec("echo ok")).output == "ok\n"


def test_stand_in_has_signatures():
    """Each call that the backend makes fits the real package's."""
    asked = dict.fromkeys(["app", "image", "tags", "cpu", "memory", "timeout", "encrypted_ports", "runtime"])
    inspect.signature(sdk.Sandbox.create).bind("python3", "-P", **asked)
    inspect.signature(sdk.App.lookup).bind("a-job", create_if_missing=True)
    inspect.signature(sdk.Image.from_registry).bind(IMAGE)
    inspect.signature(sdk.Image.entrypoint).bind(None, [])
    inspect.signature(sdk.Sandbox.wait).bind(None, raise_on_termination=False)
    inspect.signature(sdk.Sandbox.terminate).bind(None, wait=True)
    inspect.signature(sdk.Sandbox.tunnels).bind(None)
    for name in ("create", "wait", "terminate", "tunnels"):
        assert hasattr(getattr(sdk.Sandbox, name), "aio")
    assert all(isinstance(vars(sdk.Sandbox)[name], property) for name in ("stdin", "stdout", "stderr", "returncode"))


@pytest.mark.skipif(
    not os.environ.get("MODAL_TOKEN_ID"), reason="Modal itself needs an account: MODAL_TOKEN_ID is not set"
)
async def test_a_slot_in_modal_itself():
    """With ATROPOS_MODAL_IMAGE, the name in a registry of what `make image` builds."""
    async with (
        SlotPool(settings(image=os.environ["ATROPOS_MODAL_IMAGE"], start_timeout_s=600)) as pool,
        pool.lease("t") as slot,
    ):
        assert (await slot.exec("echo ok")).output == "ok\n"
