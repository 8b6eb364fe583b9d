"""Specifications of devices are read as engines read them, and what a slot can't have is refused by name."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Generator

import pytest
import yaml

from atropos.errors import ConfigError
from atropos.sandbox.host.cdi import Device, find
from atropos.sandbox.host.files.root_changer import Bind
from tests import privileges
from tests.gpus import KIND, LIBRARY, GpuMachine, gpu_machine

pytestmark = privileges.device_nodes


@pytest.fixture
def machine() -> Generator[GpuMachine]:
    with gpu_machine() as made:
        yield made


def gpus(machine: GpuMachine, *wanted: str, count: int = 1) -> list[Device]:
    return find([str(machine.specs)], wanted or [KIND], count)


def write(machine: GpuMachine, spec: dict, name: str = "gpu-test.json") -> None:
    text = yaml.safe_dump(spec) if name.endswith(".yaml") else json.dumps(spec)
    (machine.specs / name).write_text(text)


def test_device_has_kinds_edits(machine):
    first, second = gpus(machine, count=2)
    assert [first.name, second.name] == [f"{KIND}=0", f"{KIND}=1"]
    assert dict(second.env) == {"GPU": "1", "GPU_LIBRARY": "yes"}
    assert first.links == ((LIBRARY, "/opt/gpu-test/lib/libgpu-test.so"),)
    assert first.libraries == ("/opt/gpu-test/lib",)
    library = f"{LIBRARY}.2.3"
    assert second.binds == (
        Bind(f"{machine.folder}/dev/gpu1", "/dev/test-gpu1", device=True),
        Bind(f"{machine.folder}/dev/gpuctl", "/dev/test-gpuctl", device=True),
        Bind(f"{machine.folder}/lib/{library}", f"/opt/gpu-test/lib/{library}"),
    )


def test_yaml_is_read_as_json_is(machine):
    before = gpus(machine, count=2)
    (machine.specs / "gpu-test.json").unlink()
    write(machine, machine.spec(), "nvidia.yaml")
    write(machine, {"no": "spec"}, "readme.txt")
    assert gpus(machine, count=2) == before


def test_later_folders_come_first(machine):
    later = machine.folder / "run"
    later.mkdir()
    spec = machine.spec()
    spec["devices"][0]["containerEdits"]["env"] = ["GPU=later"]
    (later / "a.json").write_text(json.dumps(spec))
    (found,) = find([str(machine.specs), str(later)], [f"{KIND}=0"], 1)
    assert dict(found.env)["GPU"] == "later"
    (later / "b.json").write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match=r"has none.*b\.json: atropos\.test/gpu=0 is in .*a\.json too"):
        find([str(machine.specs), str(later)], [f"{KIND}=0"], 1)


def test_aliases_are_no_devices(machine):
    spec = machine.spec()
    whole, other, _ = spec["devices"]
    part = {
        "name": "0:0",
        "containerEdits": {"deviceNodes": [*whole["containerEdits"]["deviceNodes"], {"path": "/dev/full"}]},
    }
    spec["devices"] += [{**other, "name": "GPU-5cf1a6ad"}, part]
    write(machine, spec)
    assert [each.name for each in gpus(machine, count=2)] == [f"{KIND}=1", f"{KIND}=0:0"]
    with pytest.raises(
        ConfigError, match=r"gpus: 3 wanted; .* this machine has atropos.test/gpu=1, atropos.test/gpu=0:0"
    ):
        gpus(machine, count=3)


def test_a_container_has_devices_with_nodes(machine):
    (machine.folder / "dev" / "gpu0").unlink()
    assert [each.name for each in gpus(machine)] == [f"{KIND}=1"]
    with pytest.raises(ConfigError, match=r"atropos\.test/gpu=0: .*/dev/gpu0 is no device node"):
        gpus(machine, f"{KIND}=0")


def test_engine_devices_are_found(machine):
    spec = machine.spec()
    spec["devices"][0]["containerEdits"]["deviceNodes"] = [{"path": "/dev/full", "hostPath": "/driver/dev/gpu0"}]
    write(machine, spec)
    assert Bind("/dev/full", "/dev/full", device=True) in gpus(machine)[0].binds


def test_unopenable_are_refused(machine):
    node = machine.folder / "dev" / "gpu0"
    node.chmod(0o660)
    pid = os.fork()
    if not pid:  # as the server: no root of the host's
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            gpus(machine)
        except ConfigError as error:
            code = 0 if "mode 660" in str(error) and 'MODE="0666"' in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def changed(spec: dict, **edits: object) -> dict:
    return {**spec, "cdiVersion": "1.1.0", "containerEdits": {**spec["containerEdits"], **edits}}


HOOK = {"hookName": "createContainer", "path": "/usr/bin/vendor-hook", "args": ["vendor-hook", "--do", "it"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: {**spec, "cdiVersion": "2.0.0"}, "cdiVersion: '2.0.0': known are"),
        (lambda spec: {**spec, "cdiVersion": "0.4.0"}, "cdiVersion: 0.4.0 has not all that it uses; at least 0.5.0"),
        (lambda spec: {**spec, "kind": "gpu"}, "kind"),
        (lambda spec: {**spec, "devices": []}, "devices"),
        (lambda spec: {**spec, "more": 1}, "more: no such setting"),
        (lambda spec: changed(spec, env=["GPU"]), "NAME=VALUE"),
        (lambda spec: changed(spec, mounts=[{"hostPath": "lib", "containerPath": "/lib"}]), "whole path"),
        (lambda spec: changed(spec, hooks=[HOOK]), "the hook /usr/bin/vendor-hook --do it is not run for a slot"),
        (lambda spec: changed(spec, netDevices=[{"hostInterfaceName": "ib0", "name": "ib0"}]), "network interface"),
        (lambda spec: changed(spec, intelRdt={"closID": "a"}), "Intel RDT"),
        (
            lambda spec: changed(spec, mounts=[{"hostPath": "/no/lib", "containerPath": "/no/lib", "options": ["ro"]}]),
            "there is no /no/lib",
        ),
    ],
)
def test_bad_ones_are_refused(machine, change, said):
    write(machine, change(machine.spec()))
    with pytest.raises(ConfigError) as caught:
        gpus(machine)
    assert said in str(caught.value)


def test_older_hooks_are_read(machine):
    tool = {"hookName": "createContainer", "path": "/usr/bin/nvidia-ctk"}
    given = (
        ["create-symlinks", "--link=a::/opt/b"],
        ["update-ldcache", "--folder=/opt", "--ldconfig-path", "/sbin/ldconfig"],
    )
    hooks = [{**tool, "args": ["nvidia-ctk", "hook", *each]} for each in given]
    write(machine, changed(machine.spec(), hooks=hooks))
    (found,) = gpus(machine)
    assert (found.links, found.libraries) == ((("a", "/opt/b"),), ("/opt",))


def test_writable_is_shared_by_none(machine):
    assert stat.S_ISDIR(machine.folder.stat().st_mode)
    assert "/run/gpu-shared" not in {bind.target for bind in gpus(machine)[0].binds}
