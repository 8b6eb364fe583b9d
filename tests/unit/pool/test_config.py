"""Settings: what is wrong is named in one line, with the field."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from atropos.adapters.sharing import MAX_OUTPUT_BYTES, pool_config
from atropos.config import ServerConfig
from atropos.errors import ConfigError
from atropos.slots import EgressSecret, LeaseLimits, Quotas, Share, SlotPool, SlotPoolConfig
from atropos.slots.config import server_json
from atropos.wire import LeaseRequest, SlotLimits
from atropos.wire.base import one_line


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"slots_per_container": 0}, r"slots_per_container.*greater than or equal to 1.*got 0"),
        ({"min_containers": 3, "max_containers": 2}, r"max_containers \(2\).*min_containers \(3\)"),
        ({"privileged": True}, r"privileged: .*set it to False"),
        ({"backend": "k8s"}, r"backend.*'local', 'docker', 'ssh', 'modal', 'singularity' or 'nomad'.*k8s"),
        ({"slots": 3}, r"slots: no such setting"),
        ({"limits": {"pids": 1}}, r"limits\.pids"),
        ({"limits": {"pids": 5_000_000}}, r"limits\.pids: .*less than or equal to 4194304"),
        ({"limits": {"cpu_quota": float("inf")}}, r"limits\.cpu_quota: .*finite"),
        ({"ssh_hosts": 5}, "ssh_hosts: .*a list"),
        ({"ssh_hosts": ["a", None]}, r"ssh_hosts\.1: .*valid string"),
        ({"limits": {"output_bytes": 17_000_000}}, r"limits\.output_bytes.*less than or equal to 16000000"),
        ({"acquire_timeout_s": 0}, "acquire_timeout_s"),
        ({"acquire_timeout": 1, "acquire_timeout_s": 2}, "give one"),
        ({"job_id": "../x"}, "job_id"),
        ({"base": "ml", "bases": {"ml": "/x"}}, "base: write the whole path"),
        ({"image": "python:3.12-slim"}, "image: it names the containers' image.*set slot_image"),
        ({"slot_image": "No Image"}, "slot_image: .*not a name of an image"),
        ({"slot_image": "debian:13", "base": "/x"}, "base, slot_image: .*remove"),
        ({"images": ["debian:13", "No Image"]}, r"images\.1: .*not a name of an image"),
        (
            {"tls_certificate": "/x", "tls_key": "/x"},
            "tls_certificate: a setting of 'nomad', which backend 'local' lacks",
        ),
        ({"gpus": 1, "max_containers": 2}, "max_containers: of backend 'local', 1 can have GPUs"),
        ({"gpus": 1, "min_containers": 2, "backend": "docker"}, "max_containers: of backend 'docker', 1 can have GPUs"),
    ],
)
def test_wrong_setting_is_one_line(settings, says):
    with pytest.raises(ConfigError, match=says) as caught:
        SlotPoolConfig(**settings)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=says):
        SlotPoolConfig.model_validate(settings)


def test_gpus_are_one_container_s():
    usual = SlotPoolConfig().max_containers
    assert usual > 1
    assert SlotPoolConfig(gpus=1).max_containers == 1
    assert SlotPoolConfig(gpus=1, backend="nomad").max_containers == usual


def test_a_base_or_an_image():
    assert SlotPoolConfig(base="/x").slot_image is None
    assert SlotPoolConfig(slot_image="debian:13").base is None


def test_acquire_timeout_is_alias():
    assert SlotPoolConfig(acquire_timeout=3).acquire_timeout_s == 3


@pytest.mark.parametrize("limits", [{"memory_mib": 2048}, SlotLimits(memory_mib=2048)])
def test_limits_change_alone(limits):
    config = pool_config({"limits": limits}, network=True)
    assert (config.limits.memory_mib, config.limits.output_bytes) == (2048, MAX_OUTPUT_BYTES)
    assert config.limits.wall_s == 24 * 3600  # an agent is one command, and the host has time limits of its own
    assert pool_config({"limits": {"output_bytes": 5000}}, network=True).limits.output_bytes == 5000
    with pytest.raises(ConfigError, match=r"limits\.memory: no such setting"):
        pool_config({"limits": {"memory": 1}}, network=True)


def test_the_token_is_never_shown():
    config = SlotPoolConfig(slots_per_container=3, limits={"pids": 64}).server_config('hunter"2', die_with_parent=True)
    assert ServerConfig.model_validate(json.loads(server_json(config))) == config
    assert (config.slots, config.limits.pids, config.die_with_parent) == (3, 64, True)
    assert "hunter" not in repr(config)
    with pytest.raises(ValidationError) as refused:
        ServerConfig.model_validate({"token": ["hunter"], "slots": 0})
    assert one_line(refused.value).startswith("token: input should be a valid string (got ''); slots: ")


def test_partition_costs_nothing():
    config = SlotPoolConfig()
    assert 20 < config.reconnect_s < config.lease_ttl_s


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"backend": "docker", "docker_host": "tcp://host:99999"},
            r"docker_host or DOCKER_HOST must look like .*0-65535",
        ),
        ({"backend": "docker", "docker_host": "tcp://["}, "docker_host or DOCKER_HOST must look like .*Invalid IPv6"),
        (
            {"backend": "nomad", "nomad_address": "http://host:99999"},
            "nomad_address 'http://host:99999' must look like",
        ),
        ({"backend": "nomad", "nomad_address": "http://["}, r"nomad_address 'http://\[' must look like"),
    ],
)
async def test_bad_address_is_named(settings, says):
    with pytest.raises(ConfigError, match=says):
        await SlotPool(SlotPoolConfig(**settings)).start()


def test_a_name_is_no_backend():
    with pytest.raises(ConfigError, match=r"backend: 'local' is a name.*SlotPoolConfig\(backend="):
        SlotPool(backend="local")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LeaseLimits(memory_mib=-1), r"memory_mib: input should be greater than or equal to 32 (got -1)"),
        (lambda: LeaseLimits(memory=1), "memory: no such setting"),
        (lambda: LeaseLimits(gpu_types=("H100",)), "gpu_types: say in gpus how many of them"),
        (lambda: Quotas(slots=-1), "slots: input should be greater than or equal to 0 (got -1)"),
        (lambda: Share({"slots": 3}), "quotas: write a Quotas (got dict)"),
        (lambda: SlotPool({"backend": "local"}), "config: write a SlotPoolConfig (got dict)"),
        (lambda: EgressSecret(hosts=("a.example",), value=5), "value: input should be a valid string"),
        (lambda: EgressSecret(hosts=("a.example",), value="two\nlines"), None),
    ],
)
def test_what_users_make_is_checked(make: Callable[[], object], says: str | None):
    with pytest.raises(ConfigError) as caught:
        make()
    said = str(caught.value)
    assert "\n" not in said
    assert "two" not in said, "a secret is never shown"
    assert says in {None, said}


def test_parts_of_messages_fail_as_messages_do():
    """A server names the field of a request."""
    with pytest.raises(ValidationError) as caught:
        LeaseRequest.model_validate({"lease_id": "l" * 32, "limits": {"memory_mib": -1}})
    assert ("limits", "memory_mib") in [each["loc"] for each in caught.value.errors()]
