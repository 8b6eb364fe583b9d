"""What Harbor asks of an environment, on slots; tests/adapters/test_harbor.py runs it with that package."""

from __future__ import annotations

import json
import resource
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import side_by_side
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths

from atropos.adapters.harbor import AtroposEnvironment
from atropos.errors import ConfigError
from atropos.tasks.errors import TaskBroken
from tests import privileges
from tests.gpus import gpu_machine

LIMITS = {"memory_mib": 512, "disk_mib": 400, "wall_s": 20}
POOL = {"backend": "local", "slots_per_container": 2, "max_containers": 1, "limits": LIMITS}
TASK = Path(__file__).parent / "top-words" / "environment"
pytestmark = pytest.mark.asyncio(loop_scope="module")
NO_NETWORK = NetworkPolicy(network_mode=NetworkMode.NO_NETWORK)


def make(folder, task=TASK, config=None, **settings):
    wants = config or EnvironmentConfig()
    return AtroposEnvironment(task, "top-words", "one", TrialPaths(folder), wants, **{**POOL, **settings})


@asynccontextmanager
async def started(*arguments, force_build=False, **settings):
    made = make(*arguments, **settings)
    await made.start(force_build=force_build)
    try:
        yield made
    finally:
        await made.stop(delete=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def environment(tmp_path_factory):
    made = make(tmp_path_factory.mktemp("trial"))
    await made.start(force_build=False)
    yield made
    await made.stop(delete=True)


async def test_a_changing_folder_is_downloaded(environment, tmp_path):
    await environment.exec("mkdir -p /logs/busy; head -c 20m /dev/zero >/logs/busy/log")
    await environment.exec("(while true; do echo line; done >>/logs/busy/log) >/dev/null 2>&1 &")
    for number in range(2):
        await environment.download_dir("/logs/busy", tmp_path / str(number))
        assert (tmp_path / str(number) / "log").stat().st_size >= 20 * 1024**2
    await environment.exec("pkill -f 'while true'; rm -r /logs/busy")


async def test_a_folder_that_fills_its_disk_comes(environment, tmp_path):
    await environment.exec("mkdir -p /large/in; head -c 250m /dev/zero >/large/in/x; ln -s in/x /large/link")
    await environment.download_dir("/large", tmp_path / "large")
    assert (tmp_path / "large" / "link").stat().st_size == 250 * 1024**2
    await environment.exec("rm -rf /large")


async def test_files_are_filtered_by_whole_names(environment, tmp_path):
    names = 3 * "file-with-a-name-of-a-length-that-makes-their-list-longer-than-a-megabyte-"
    folder = f"{names}/{names}/{names}"
    await environment.exec(f"mkdir -p /many/{folder}; cd /many/{folder}; seq -f {names}%g 1 1200 | xargs touch")
    await environment.download_dir_filtered(
        source_dir="/many", target_dir=tmp_path / "many", include=["**"], exclude=[]
    )
    assert len([*(tmp_path / "many" / folder).iterdir()]) == 1_200
    for mib in (10, 11):
        said = (await environment.exec(f"yes | head -c {mib}m")).stdout
        assert (len(said) == mib * 1024**2) == (mib == 10), "the most that is kept of a command"


async def test_uploads_go_to_a_path_or_folder(environment, tmp_path):
    (tmp_path / "file").write_text("x")
    await environment.exec("mkdir -p /up/there")
    for target in ("/up/there", "/up/new/", "/up/named"):
        await environment.upload_file(tmp_path / "file", target)
    assert (await environment.exec("cd /up; find -type f | sort")).stdout == "./named\n./new/file\n./there/file\n"


async def test_a_download_appears_once_whole(environment, tmp_path):
    await environment.exec("truncate -s 300m /sparse; echo end >>/sparse")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await environment.download_file("/sparse", tmp_path / "new" / "sparse")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10
    with (tmp_path / "new" / "sparse").open("rb") as file:
        assert file.seek(300 << 20) and file.read() == b"end\n"
    with pytest.raises(FileNotFoundError):
        await environment.download_file("/nothing", tmp_path / "new" / "nothing")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sparse"]
    await environment.exec("rm /sparse")


async def test_a_limit_of_zero_is_none(environment):
    assert (await environment.exec("sleep 0.5; echo slept", timeout_sec=0)).stdout == "slept\n"
    with pytest.raises(RuntimeError, match="after 1 seconds"):
        await environment.exec("sleep 60", timeout_sec=1)
    with pytest.raises(RuntimeError, match=r"limits\.wall_s"):
        await environment.exec("sleep 60")


@privileges.device_nodes
async def test_a_trial_has_its_gpus(tmp_path):
    with gpu_machine() as machine:
        wants = EnvironmentConfig(gpus=1, gpu_types=["T1000"])
        async with started(tmp_path, config=wants, **machine.settings()) as made:
            assert (await made.exec("echo /dev/test-*")).stdout == "/dev/test-gpu0 /dev/test-gpuctl\n"
        with pytest.raises(ConfigError, match=r"gpu_types: H100 wanted, they are T1000"):
            await make(tmp_path, config=EnvironmentConfig(gpus=1, gpu_types=["H100"]), **machine.settings()).start(
                force_build=False
            )
    with pytest.raises(RuntimeError, match="GPU"):
        make(tmp_path, config=EnvironmentConfig(gpus=1))


async def test_killed_has_dockers_code(environment):
    assert (await environment.exec("kill -9 $$")).return_code == 137


async def test_policies_hold_at_once(tmp_path):
    """A pool's network is narrowed for one environment; `refused` is what its proxy says of a host that is not named."""
    allowed = NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["allowed.test", "*.x.test"])
    environment = make(tmp_path, network_policy=NO_NETWORK, phase_network_policies=[allowed])
    await environment.start(force_build=False)

    async def refused(host):
        ask = f"curl -s -o /dev/null -w '%{{http_code}} %header{{x-atropos-refused}}' http://{host}/"
        return "list of allowed hosts" in ((await environment.exec(ask)).stdout or "")

    try:
        assert await refused("allowed.test")
        await environment.set_network_policy(allowed)
        assert await refused("other.test")
        assert not await refused("allowed.test")
        assert not await refused("a.x.test")
        await environment.set_network_policy(NetworkPolicy())
        assert not await refused("other.test")
        await environment.set_network_policy(NO_NETWORK)
        assert await refused("allowed.test")
    finally:
        await environment.stop(delete=True)


async def online(environment):
    """Whether the proxy of its pool answers."""
    return (await environment.exec("curl -s http://any.test/")).return_code == 0


async def test_a_trial_without_network_has_none(environment, tmp_path):
    assert await online(environment)
    async with started(tmp_path, network_policy=NO_NETWORK) as made:
        assert not await online(made)


def written(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


async def test_a_separate_verifier_has_its_folder(environment, tmp_path):
    files = {
        "task.toml": '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\n',
        "instruction.md": "Do it.",
        "environment/Dockerfile": "FROM debian\nWORKDIR /agent\n",
        "tests/Dockerfile": "FROM debian\nWORKDIR /verifier\nCOPY test.sh /tests/\n",
        "tests/test.sh": "echo tested\n",
        "steps/one/tests/Dockerfile": "FROM debian\nWORKDIR /step\nCOPY check /tests/test.sh\n",
        "steps/one/tests/check": "echo checked\n",
    }
    task = written(tmp_path, files)
    for folder, says in (("tests", "/verifier\ntested\n"), ("steps/one/tests", "/step\nchecked\n")):
        async with started(tmp_path, task / folder, enable_environment_dir_upload=False) as verifier:
            assert (await verifier.exec("pwd; sh /tests/test.sh")).stdout == says


async def test_harbors_own_settings_are_left_alone(environment, tmp_path):
    """Variables of this machine, an earlier conversation, a verifier of another kind than tests/test.sh."""
    files = {
        "task.toml": '[verifier.env]\nKEY = "${NOT_SET_HERE}"\n',
        "instruction.md": "Do it.",
        "trajectory.json": "{}",
        "environment/Dockerfile": "FROM debian\nRUN touch /built\n",
    }
    async with started(tmp_path, written(tmp_path, files) / "environment") as made:
        assert (await made.exec("ls /built")).stdout == "/built\n"


async def test_forced_build_is_of_the_file(environment, tmp_path):
    folder = written(tmp_path, {"Dockerfile": "FROM debian\nRUN touch /built\n"})
    for force, code in ((False, 1), (True, 0)):
        config = EnvironmentConfig(docker_image="atropos-base:default")
        async with started(tmp_path, folder, config, force_build=force) as made:
            assert (await made.exec("test -e /built")).return_code == code


async def test_an_unbuilt_dockerfile_is_not_read(environment, tmp_path):
    folder = written(tmp_path, {"Dockerfile": "FROM debian\nRUN --network=host true\n"})
    config = EnvironmentConfig(docker_image="atropos-base:default")
    async with started(tmp_path, folder, config) as made:
        assert (await made.exec("true")).return_code == 0
    with pytest.raises(ConfigError, match=r"Dockerfile:2: .*--network"):
        await make(tmp_path, folder, config).start(force_build=True)


async def test_an_entrypoint_runs_beside_the_agent(environment, tmp_path):
    script = "#!/bin/sh\\necho $WORD $PWD $(id -un) $* >/said\\nexec $*\\n"
    build = f"RUN printf '{script}' >/start; chmod +x /start; mkfifo -m 666 /said"
    lines = ["FROM debian", build, "WORKDIR /srv", "USER nobody"]
    folder = written(tmp_path, {"Dockerfile": "\n".join([*lines, 'ENTRYPOINT ["/start"]', 'CMD ["false"]'])})
    async with started(tmp_path, folder, EnvironmentConfig(env={"WORD": "hello"})) as made:
        assert (await made.exec("cat /said", timeout_sec=10)).stdout == "hello /srv nobody sh -c sleep infinity\n"
    (folder / "Dockerfile").write_text("\n".join([*lines, 'ENTRYPOINT ["/nothing"]']))
    with pytest.raises(TaskBroken, match="ENTRYPOINT /nothing"):
        await make(tmp_path, folder).start(force_build=False)


async def test_setup_sh_is_a_plain_file(environment, tmp_path):
    folder = written(tmp_path, {"Dockerfile": "FROM debian\nWORKDIR /srv\nCOPY . .\n", "setup.sh": "touch /ran"})
    for config in (EnvironmentConfig(), EnvironmentConfig(docker_image="atropos-base:default", workdir="/srv")):
        async with started(tmp_path, folder, config) as made:
            assert (await made.exec("cd /srv; ls -d setup.sh /ran")).stdout == "setup.sh\n"
        (folder / "Dockerfile").unlink(missing_ok=True)


async def test_stand_in_images_are_a_setting(environment, tmp_path):
    folder = written(tmp_path, {"Dockerfile": "FROM nowhere.test/one:1\nRUN touch /built\n"})
    async with started(tmp_path, folder, task_images=["nowhere.test/*"]) as made:
        assert (await made.exec("test -e /built")).return_code == 0
    with pytest.raises(ConfigError, match="task_images: a list"):
        make(tmp_path, task_images="debian*")


async def test_a_misspelt_setting_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="--ek slots_per_contaner: no field"):
        make(tmp_path, slots_per_contaner=4)


async def test_a_mount_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--mounts: /data"):
        make(tmp_path, mounts=[{"type": "bind", "source": str(tmp_path), "target": "/data"}])


async def test_the_time_of_a_build_is_harbors(environment, tmp_path):
    """It has multipliers for it."""
    folder = written(tmp_path, {"Dockerfile": f"FROM debian\nRUN echo {tmp_path}\n"})
    async with started(tmp_path, folder, EnvironmentConfig(build_timeout_sec=0.001)) as made:
        assert (await made.exec("true")).return_code == 0


async def test_a_task_has_the_room_that_it_asks_for(environment, tmp_path):
    three = {"slots_per_container": 3}
    config = EnvironmentConfig(memory_mb=1000, storage_mb=700, cpus=0.5)
    async with started(tmp_path, config=config, **three) as made:
        assert (await made.exec("head -c 600m /dev/zero >/large")).return_code == 0
        with pytest.raises(ConfigError, match=r"limits\.memory_mib: 4096 asked for, the largest container has 1536"):
            await make(tmp_path, config=EnvironmentConfig(memory_mb=4096), **three).start(force_build=False)
    async with started(tmp_path, config=EnvironmentConfig(memory_mb=2048, storage_mb=10_240)) as made:
        # which older schemas wrote into every task.toml
        assert (await made.exec("head -c 450m /dev/zero >/large")).return_code != 0


async def test_links_that_lead_out_are_left_out(environment, tmp_path):
    await environment.exec("mkdir /out; cd /out; echo 1 >b; ln -s /etc/passwd a; ln -s ../etc/passwd c; ln -s b d")
    await environment.download_dir("/out", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["b", "d"]
    await environment.exec("rm -r /out")


@privileges.cgroups
async def test_a_compose_file_sets_network_and_memory(environment, tmp_path):
    service = {"build": ".", "network_mode": "none", "mem_limit": "600m", "environment": {"WORD": "hello"}}
    files = {"docker-compose.yaml": json.dumps({"services": {"main": service}}), "Dockerfile": "FROM debian\n"}
    async with started(tmp_path, written(tmp_path, files), slots_per_container=3) as made:
        assert not await online(made)
        for mib in (570, 640):  # a slot has 512 else
            result = await made.exec(f"dd if=/dev/zero of=/dev/null bs={mib}M count=1")
            assert (result.return_code == 0) == (mib < 600)
        await made.set_network_policy(NetworkPolicy(network_mode=NetworkMode.ALLOWLIST, allowed_hosts=["a.test"]))
        assert (await made.exec("echo $WORD")).stdout == "hello\n"


async def test_services_are_slots_beside_it(environment, tmp_path):
    serving = "echo $$WORD > word; exec python3 -m http.server 80"
    web = {
        "image": "python:3.12",
        "working_dir": "/pages",
        "command": ["sh", "-c", serving],
        "environment": {"WORD": "hello"},
        "healthcheck": {
            "test": ["CMD", "bash", "-c", "exec 3<>/dev/tcp/localhost/80"],
            "interval": "1s",
            "retries": 60,
        },
    }
    main = {"build": ".", "depends_on": {"web": {"condition": "service_healthy"}}, "volumes": ["./given:/given:ro"]}
    files = {
        "docker-compose.yaml": json.dumps({"services": {"main": main, "web": web}}),
        "Dockerfile": "FROM python:3.12\n",
        "given/one": "1\n",
    }
    ask = 'python3 -c \'import urllib.request as u; print(u.urlopen("http://web/word").read().decode(), end="")\''
    async with started(tmp_path, written(tmp_path, files), slots_per_container=3) as made:
        assert (await made.exec(f"{ask}; cat /given/one")).stdout == "hello\n1\n"
        assert (await made.service_exec("pwd; echo $WORD; ls /given", service="web")).stdout == "/pages\nhello\n"
        await made.service_download_file("/pages/word", tmp_path / "word", service="web")
        await made.service_download_dir_with_exclusions(
            source_dir="/pages", target_dir=tmp_path / "pages", exclude=["x"], service="web"
        )
        assert (tmp_path / "word").read_text() == (tmp_path / "pages/word").read_text() == "hello\n"
        assert await made.service_is_dir("/pages", service="web")
        with pytest.raises(ConfigError, match="service 'db': the compose file has web"):
            await made.service_exec("true", service="db")
        await made.exec("(exec -a of-the-agent sleep 1000) >/dev/null 2>&1 &")
        await made.stop_service("main")
        assert (await made.exec("pgrep -fx 'of-the-agent 1000'")).return_code == 1
        assert (await made.service_exec("cat word", service="web")).stdout == "hello\n"
    with pytest.raises(ConfigError, match="--extra-docker-compose"):
        make(tmp_path, extra_docker_compose=[tmp_path / "docker-compose.yaml"])


@privileges.cgroups
async def test_services_have_their_sizes(environment, tmp_path):
    waits = {"image": "debian", "command": "sleep infinity"}
    said = {"main": {"build": "."}, "db": {**waits, "mem_limit": "2g"}, "browser": {**waits, "shm_size": "600m"}}
    files = {"docker-compose.yaml": json.dumps({"services": said}), "Dockerfile": "FROM debian\n"}
    config = EnvironmentConfig(memory_mb=2048, storage_mb=10_240)  # which older schemas wrote into every task.toml
    async with started(tmp_path, written(tmp_path, files), config, slots_per_container=7) as made:
        large = "dd if=/dev/zero of=/dev/null bs=640M count=1"
        assert (await made.service_exec(large, service="db")).return_code == 0
        assert (await made.exec(large)).return_code != 0
        assert (await made.service_exec("head -c 480m /dev/zero >/dev/shm/x", service="browser")).return_code == 0


async def test_commands_run_beside_a_waiting_one(environment):
    async def run(line):
        return (await environment.exec(line)).stdout

    assert await side_by_side.answer(run) == "42\n"
