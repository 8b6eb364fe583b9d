"""Specifications of devices are read as engines read them, and what a slot can't have is refused by name."""

from __future__ import annotations

import json
import os
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
    assert first.links == (
        (LIBRARY, "/opt/gpu-test/lib/libgpu-test.so"),
        ("../test-gpu0", "/dev/by-path/gpu0"),
    )
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
    for folders in ([machine.specs, later], [later, machine.specs]):
        with pytest.raises(ConfigError, match=r"has none.*b\.json: atropos\.test/gpu=0 is in .*a\.json too"):
            find([*map(str, folders)], [f"{KIND}=0"], 1)


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
    for wanted in (("1", "GPU-5cf1a6ad"), ("0:0", "0"), ("0", "all"), ("1", "1")):
        with pytest.raises(ConfigError, match=f"gpu_devices: {KIND}={wanted[0]} and {KIND}={wanted[1]} are the same"):
            gpus(machine, *(f"{KIND}={name}" for name in wanted), count=2)
    with pytest.raises(ConfigError, match="are the same device"):
        gpus(machine, KIND, f"{KIND}=1", count=3)
    assert [each.name for each in gpus(machine, f"{KIND}=0", f"{KIND}=all")] == [f"{KIND}=0"]


@pytest.mark.parametrize(
    "nodes",
    [
        [{"path": "/dev/gpu0", "hostPath": "/dev/null"}, {"path": "/dev/gpu1", "hostPath": "/dev/null"}],
        [{"path": "/dev/gpu", "hostPath": "/dev/zero"}, {"path": "/dev/gpu", "hostPath": "/dev/null"}],
        [None, None],
    ],
    ids=["one on the host", "one in containers", "no nodes"],
)
def test_different_devices_stay_so(machine, nodes):
    spec = machine.spec()
    spec["devices"] = [
        {"name": f"g{number}", "containerEdits": {"deviceNodes": [node] if node else [], "env": [f"GPU={number}"]}}
        for number, node in enumerate(nodes)
    ]
    write(machine, spec)
    assert [each.name for each in gpus(machine, count=2)] == [f"{KIND}=g0", f"{KIND}=g1"]


def test_all_is_wsl_s_only_device(machine):
    spec = machine.spec()
    spec["devices"] = [{"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/null"}]}}]
    write(machine, spec)
    assert [each.name for each in gpus(machine)] == [f"{KIND}=all"]


def test_unwanted_devices_are_not_judged(machine):
    spec = machine.spec()
    spec["devices"][1]["containerEdits"]["hooks"] = [HOOK]
    write(machine, spec)
    assert [each.name for each in gpus(machine)] == [f"{KIND}=0"]
    with pytest.raises(ConfigError, match=f"{KIND}=1: the hook"):
        gpus(machine, count=2)


def test_a_number_is_enough(machine):
    spec = machine.spec()
    spec["devices"][0]["containerEdits"]["deviceNodes"] = [
        {"path": "/dev/made-by-engines", "type": "c", "major": 1, "minor": 5}
    ]
    write(machine, spec)
    assert Bind("/dev/zero", "/dev/made-by-engines", device=True) in gpus(machine, f"{KIND}=0")[0].binds


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


@pytest.mark.parametrize(
    ("mode", "opens"), [(0o666, True), (0o444, True), (0o660, False), (0o644, False), (0o400, False), (0, False)]
)
def test_everybody_opens_as_the_owner_does(machine, mode, opens):
    (machine.folder / "dev" / "gpu0").chmod(mode)
    pid = os.fork()
    if not pid:  # as the server: no root of the host's
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            code = 0 if gpus(machine) and opens else 1
        except ConfigError as error:
            code = 0 if f"mode {mode:o}:" in str(error) and 'MODE="0666"' in str(error) and not opens else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_permissions_are_those_of_the_mode(machine):
    spec = machine.spec()
    spec["devices"][0]["containerEdits"]["deviceNodes"][0]["permissions"] = "r"
    write(machine, spec)
    with pytest.raises(ConfigError, match="/dev/test-gpu0 has permissions 'r'"):
        gpus(machine)
    (machine.folder / "dev" / "gpu0").chmod(0o444)
    assert gpus(machine)[0].name == f"{KIND}=0"


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
        (lambda spec: changed(spec, hooks=[{**HOOK, "hookName": "before"}]), "hookName"),
        (lambda spec: changed(spec, deviceNodes=[{"path": "/dev/null", "type": "d"}]), "type"),
        (lambda spec: changed(spec, deviceNodes=[{"path": "/dev/null", "permissions": "rx"}]), "permissions"),
        (lambda spec: changed(spec, deviceNodes=[{"path": "/dev/null", "permissions": "rm"}]), "permissions 'rm', and"),
        (
            lambda spec: changed(spec, deviceNodes=[{"path": "/dev/null", "permissions": "none"}]),
            "'none', and its mode",
        ),
        (lambda spec: changed(spec, deviceNodes=[{"path": "/etc/passwd"}]), "/etc/passwd is no device node"),
        (
            lambda spec: changed(
                spec, mounts=[{"hostPath": "/tmp", "containerPath": "/x", "options": ["ro"], "type": "tmpfs"}]
            ),
            "no slot has a mount of type tmpfs, as at /x",
        ),
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
    assert (found.links[0], found.libraries) == (("a", "/opt/b"), ("/opt",))


def test_what_is_shared_is_left_out(machine):
    """Writable folders, and sockets: nvidia-ctk up to 1.18 says of its daemons' that they are read-only."""
    folder = machine.folder / "data"
    folder.mkdir()
    os.mkfifo(folder / "pipe")
    mounts = machine.spec()["containerEdits"]["mounts"]
    write(machine, changed(machine.spec(), mounts=[*mounts, mount(folder, "/run/gpu-pipes")]))
    (found,) = gpus(machine)
    sockets = ["/run/gpu-daemon/socket", "/run/gpu-pipes"]
    assert {bind.target for bind in found.binds}.isdisjoint({"/run/gpu-shared", *sockets})
    assert [bind.target for bind in found.sockets] == sockets
    in_container = mount("/gone", str(folder / "pipe"))
    write(machine, changed(machine.spec(), mounts=[in_container]))
    assert [bind.source for bind in gpus(machine)[0].sockets] == [str(folder / "pipe")]
    write(machine, changed(machine.spec(), mounts=[*mounts, mount(folder, "/run/gpu-pipes")]))
    (folder / "pipe").unlink()
    bind = Bind(str(folder), "/run/gpu-pipes", no_exec=True)
    assert bind in gpus(machine)[0].binds


def mount(source: object, target: str, *options: str) -> dict[str, object]:
    return {
        "hostPath": str(source),
        "containerPath": target,
        "options": [*(options or ("ro", "noexec")), "nosuid", "nodev", "rbind"],
    }


# Files as vendors' tools write them, with harmless nodes. Sources: pkg/nvcdi of nvidia-container-toolkit 1.20, with the nodes' facts
# that it adds since 1.19; internal/cdi of ROCm's container-toolkit; cdihelpers of intel-resource-drivers-for-kubernetes.
NVIDIA = """---
cdiVersion: 0.7.0
kind: nvidia.com/gpu
devices:
    - name: "0"
      containerEdits: &first
        deviceNodes:
            - path: /dev/null
              major: 1
              minor: 3
              fileMode: 438
              permissions: rwm
        hooks:
            - hookName: createContainer
              path: /usr/bin/nvidia-cdi-hook
              args: [nvidia-cdi-hook, create-symlinks, --link, "../card1::/dev/dri/by-path/pci-0000:01:00.0-card"]
              env: ["NVIDIA_CTK_DEBUG=false"]
        additionalGids: [44]
    - name: "1"
      containerEdits: {deviceNodes: [{path: /dev/zero}]}
    - name: GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76
      containerEdits: *first
    - name: all
      containerEdits: {deviceNodes: [{path: /dev/null}, {path: /dev/zero}]}
containerEdits:
    env: [NVIDIA_CTK_LIBCUDA_DIR=/lib/x86_64-linux-gnu, NVIDIA_VISIBLE_DEVICES=void]
    deviceNodes: [{path: /dev/full, permissions: rwm}]
    hooks:
        - {hookName: createContainer, path: /usr/bin/nvidia-cdi-hook, args: [nvidia-cdi-hook, update-application-profile]}
    mounts:
        - {hostPath: /etc/passwd, containerPath: /etc/nvidia, options: [ro, nosuid, nodev, rbind, rprivate]}
"""
AMD = """{"cdiVersion": "0.6.0", "kind": "amd.com/gpu", "containerEdits": {}, "devices": [
  {"name": "0", "containerEdits": {"deviceNodes": [
    {"path": "/dev/null", "type": "c", "major": 1, "minor": 3, "fileMode": 438, "permissions": "rwm", "uid": 0, "gid": 44},
    {"path": "/dev/full", "type": "c", "major": 1, "minor": 7, "fileMode": 438, "permissions": "rwm", "uid": 0, "gid": 0}]}},
  {"name": "1", "containerEdits": {"deviceNodes": [{"path": "/dev/zero", "type": "c"}, {"path": "/dev/full"}]}},
  {"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/null"}, {"path": "/dev/zero"}, {"path": "/dev/full"}]}}]}
"""
INTEL = """
cdiVersion: 0.5.0
kind: intel.com/gpu
containerEdits: {}
devices:
- name: 0000-03-00-0-0x56c0
  containerEdits:
    deviceNodes:
    - {path: /dev/dri/card0, hostPath: /dev/null, type: c}
    mounts:
    - {hostPath: /dev/full, containerPath: "/dev/dri/by-path/pci-0000:03:00.0-card", type: none, options: [bind, rw]}
- name: 1
  containerEdits:
    deviceNodes: [{path: /dev/dri/card1, hostPath: /dev/zero, type: c}]
    mounts:
"""


@pytest.mark.parametrize(
    ("kind", "text", "names", "targets"),
    [
        ("nvidia.com/gpu", NVIDIA, ["0", "1"], ["/dev/full", "/dev/null", "/etc/nvidia"]),
        ("amd.com/gpu", AMD, ["0", "1"], ["/dev/full", "/dev/null"]),
        (
            "intel.com/gpu",
            INTEL,
            ["0000-03-00-0-0x56c0", "1"],
            ["/dev/dri/by-path/pci-0000:03:00.0-card", "/dev/dri/card0"],
        ),
    ],
    ids=["nvidia", "amd", "intel"],
)
def test_vendors_files_are_read(tmp_path, kind, text, names, targets):
    (tmp_path / "vendor.yaml").write_text(text)
    found = find([str(tmp_path)], [kind], 2)
    assert [each.name for each in found] == [f"{kind}={name}" for name in names]
    assert [bind.target for bind in found[0].binds] == targets
    assert all(bind.device for bind in found[0].binds if bind.target.startswith("/dev/"))
