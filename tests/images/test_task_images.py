"""Tasks over the image store: what they name is pulled, what they build is kept, and no step runs twice."""

import asyncio
import contextlib
import gzip
import hashlib
import io
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from atropos.errors import ImageUnavailable
from atropos.metrics import exposition
from atropos.tasks import workspace
from atropos.tasks.builder import steps
from atropos.tasks.builder.transfer import unpack_archive
from atropos.tasks.errors import TaskBroken
from atropos.tasks.folder import load_task
from atropos.tasks.format.recipe import Download
from atropos.tasks.prepare import TaskImages
from atropos.wire import MAX_FILE_BYTES, HealthConfig
from tests import privileges
from tests.files import write_files
from tests.images.making import entry, folder, layer, layout, link
from tests.images.test_leases import BUSYBOX, busybox_image, pool_fixture, pool_for  # noqa: F401 (a fixture)
from tests.needs import needs
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    privileges.owners,
]
TWELVE = (
    "FROM debian\nENV WHO=me\nWORKDIR /app\n"
    + "".join(f"RUN echo {n} >> log\n" for n in range(9))
    + ("COPY given.txt /app/\nUSER daemon\nRUN id -un > /tmp/who\n")
)


def make(root, dockerfile=None, *, toml="", files=None):
    write_files(
        root,
        {
            "task.toml": f'version = "1.0"\n{toml}',
            "instruction.md": "Do it.",
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
            "environment/given.txt": "given",
            **({} if dockerfile is None else {"environment/Dockerfile": dockerfile}),
            **(files or {}),
        },
    )
    return load_task(root)


@contextlib.asynccontextmanager
async def working_on(pool, images, task):
    prepared = await images.prepare(task)
    async with pool.lease("agent", image=prepared.image) as slot:
        await workspace.enter(slot, prepared.task)
        yield slot


async def test_a_step_runs_once_a_host(tmp_path):
    task = make(tmp_path / "task", TWELVE)
    states = []
    async with pool_for(tmp_path) as pool:
        images = TaskImages(pool)
        first = await images.prepare(task, progress=lambda state: states.append(str(state)))
        assert images.counters["steps"] == 12
        assert states[:1] + states[-2:] == ["queued", "building step 12/12", "ready"]
        async with working_on(pool, images, task) as slot:
            assert (await slot.exec("cat log /tmp/who; echo $WHO; pwd")).output == (
                "".join(f"{n}\n" for n in range(9)) + "daemon\nme\n/app\n"
            )
        assert images.counters == {"steps": 12, "hits": 1}
    async with pool_for(tmp_path) as pool:
        images = TaskImages(pool)
        assert (await images.prepare(task)).image == first.image
        assert images.counters == {"hits": 1}
        (tmp_path / "task/environment/given.txt").write_text("changed")
        async with working_on(pool, images, load_task(tmp_path / "task")) as slot:
            assert (await slot.exec("cat given.txt")).output == "changed"
        assert images.counters["steps"] == 2, "the COPY and what follows it"
        other = make(
            tmp_path / "other", TWELVE.replace("RUN id", "RUN true; id"), files={"environment/given.txt": "changed"}
        )
        await images.prepare(other)
        assert images.counters["steps"] == 3, "steps are shared with other tasks"


async def test_files_are_read_once(tmp_path):
    task = make(tmp_path / "task", "FROM debian\nWORKDIR /app\nCOPY given.txt .\n")
    given = tmp_path / "task/environment/given.txt"
    async with pool_for(tmp_path) as pool:
        images = TaskImages(pool)
        first = await images.prepare(task)
        given.unlink()
        assert (await images.prepare(task)).image == first.image
        assert images.counters == {"steps": 2, "hits": 1}
        given.write_text("changed")
        shutil.rmtree(tmp_path / "store/layers" / first.image.removeprefix("atropos-build:"))
        async with working_on(pool, images, task) as slot:
            assert (await slot.exec("cat given.txt")).output == "changed"


async def test_a_failed_step_is_named_and_not_kept(tmp_path):
    task = make(tmp_path / "task", "FROM debian\nRUN true\nRUN seq 100; exit 3\n")
    states = []
    async with pool_for(tmp_path) as pool:
        images = TaskImages(pool)
        for _ in range(2):
            with pytest.raises(TaskBroken, match=r"task: step 2/2: .*seq 100.* ended with 3: 51\n52\n") as failure:
                await images.prepare(task, progress=states.append)
            assert str(failure.value).endswith("\n99\n100")
            assert (states[-1].phase, states[-1].error) == ("failed", str(failure.value))
        assert images.counters["steps"] == 3
        blocked = make(tmp_path / "blocked", "FROM debian\nRUN touch /file\nWORKDIR /file/in/here\n")
        with pytest.raises(TaskBroken, match=r"WORKDIR /file/in/here\): .*Not a directory: '/file"):
            await images.prepare(blocked)


async def test_pools_prepare_tasks(tmp_path):
    task = make(tmp_path / "task", TWELVE, toml='[environment.env]\nMORE = "1"\n')
    states = []
    async with pool_for(tmp_path) as pool:
        for what in (task, load_task(tmp_path / "task/environment/Dockerfile")):
            image = await pool.prepare(what, progress=lambda _, state: states.append(str(state)))
            async with pool.lease("one", image=image.source) as slot:
                r = await slot.exec("pwd; id -un; echo $WHO$MORE; ls; cat given.txt")
                more = "1" if what is task else ""
                assert r.output.splitlines() == ["/app", "daemon", f"me{more}", "given.txt", "log", "given"]
        assert states[:2] + states[13:] == ["queued", "building step 1/12", "ready", "queued", "ready"]
        (tmp_path / "task/environment/Dockerfile").write_text("FROM debian\nRUN echo no; exit 3\n")
        with pytest.raises(TaskBroken, match=r"step 1/1: .*ended with 3: no"):
            await pool.prepare(load_task(tmp_path / "task/environment/Dockerfile"))
        text = exposition(pool.metrics())
        assert 'atropos_pool_build_seconds_count{result="ok"} 14' in text
        assert 'atropos_pool_build_seconds_count{result="error"} 1' in text


async def test_processes_share_a_tasks_steps(tmp_path):
    make(tmp_path / "task", "FROM debian\nRUN sleep 3; head -c 8 /dev/urandom | od -x > /made\nRUN echo 2 > /two\n")
    program = f"""
import asyncio, sys
from atropos.config import ImageStoreSettings
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages

async def main():
    store = ImageStoreSettings(folder={str(tmp_path / "store")!r})
    async with SlotPool(SlotPoolConfig(slots_per_container=1, max_containers=1, image_store=store)) as pool:
        print("up", flush=True)
        sys.stdin.readline()
        images, states = TaskImages(pool), []
        await images.prepare(load_task({str(tmp_path / "task")!r}), lambda state: states.append(str(state)))
        print(images.counters["steps"], "waiting" in states, flush=True)

asyncio.run(main())
"""
    pipe = asyncio.subprocess.PIPE
    running = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdin=pipe, stdout=pipe) for _ in range(2)
    ]
    for each in running:
        assert await each.stdout.readline() == b"up\n"
    said = [out.split() for out, _ in await asyncio.gather(*(each.communicate(b"go\n") for each in running))]
    assert sum(int(steps) for steps, _ in said) == 2, said
    assert b"True" in {waited for _, waited in said}, said


async def test_builds_on_scratch_share_steps(pool, tmp_path):
    texts = ["same"] * 4 + [f"other-{number}" for number in range(4)]
    tasks = [
        make(
            tmp_path / str(number),
            "FROM scratch\nCOPY given.txt /\nWORKDIR /srv\n",
            files={"environment/given.txt": text},
        )
        for number, text in enumerate(texts)
    ]
    builders = [TaskImages(pool) for _ in range(4)]  # as processes have them
    found = await asyncio.gather(*(builders[number % 4].prepare(task) for number, task in enumerate(tasks)))
    assert len({one.image for one in found}) == len(set(texts))
    assert sum(builder.counters["steps"] for builder in builders) == 2 * len(set(texts))
    for one, text in zip(found, texts, strict=True):
        async with pool.lease("look", image=one.image) as slot:
            assert await slot.read_file("/given.txt") == text.encode()


async def test_a_dockerfile_starts_from_its_image(tmp_path, images):
    busybox_image(tmp_path / "layout", user="app")
    images.push(tmp_path / "layout", "app:1")
    name = f"{images.host}/app:1"
    task = make(
        tmp_path / "task",
        f"FROM {name}\nRUN echo $GREETING > made; id -u >> made\nCOPY --chown=app given.txt sub/\nENV PATH=/own:$PATH\n"
        f"FROM scratch\nCOPY --from={name} --chmod=u=rwx,go=rX /bin/ /bin/\nCOPY --from=0 /srv/app /data\n"
        "COPY --from=0 /srv/app/sub/given.txt /etc/passwd\nWORKDIR /data\n",
    )
    async with pool_for(tmp_path, images) as pool:
        built = TaskImages(pool)
        async with working_on(pool, built, task) as slot:
            r = await slot.exec(
                "cat made sub/given.txt; stat -c %u:%g made sub/given.txt; ls /; stat -c %a /bin/busybox"
            )
            assert r.output.split() == [
                *("from", "the", "image", "1000", "given1000:1000", "1000:1000"),
                *("bin", "data", "dev", "etc", "logs", "proc", "root", "sys", "tmp", "usr", "workspace", "755"),
            ]
        first = make(tmp_path / "first", f"FROM {name}\nRUN id -u > made\nCOPY --chown=app given.txt sub/\n")
        async with working_on(pool, built, first) as slot:
            r = await slot.exec("pwd; id -u; cat made; stat -c %u:%g made sub/given.txt; echo $GREETING; echo x > text")
            assert (r.exit_code, r.output) == (0, "/srv/app\n1000\n1000\n1000:1000\n1000:1000\nfrom the image\n")


async def test_owners_come_with_archive_and_stage(pool, tmp_path):
    busybox_image(tmp_path / "layout")
    (tmp_path / "task/environment/empty").mkdir(parents=True)
    with tarfile.open(tmp_path / "task/environment/tree.tar.xz", "w:xz") as tar:
        for name, mode, owner in (("it", 0o4750, 1000), ("other", 0o600, 0)):
            info = tarfile.TarInfo(f"./in/{name}")
            info.mode, info.uid, info.gid = mode, owner, 50
            tar.addfile(info)
        info = tarfile.TarInfo("./in/hard")
        info.type, info.linkname = tarfile.LNKTYPE, "./in/it"
        tar.addfile(info)
    task = make(
        tmp_path / "task",
        f"FROM oci:{tmp_path}/layout AS first\nFROM scratch\nCOPY --from=first /bin /bin\nCOPY --from=first /srv /srv\nADD tree.tar.xz /added\n"
        "COPY --from=first --chown=root /srv/app /roots\nCOPY empty /empty\nCOPY --chown=:7 given.txt /grouped\nCOPY --chown=root:7 given.txt /too\n",
    )
    prepared = await TaskImages(pool, ()).prepare(task)
    async with pool.lease("one", image=prepared.image) as slot:
        where = "/srv/app/text /roots/text /added/in/it /added/in/other /added/in/hard /empty /grouped /too"
        r = await slot.exec(f"PATH=/bin stat -c '%u:%g %a' {where}", workdir="/")
        owners = ["1000:1000 644", "0:0 644", "1000:50 4750", "0:50 600", "1000:50 4750", "0:0 755", *2 * ["0:7 644"]]
        assert r.output.splitlines() == owners


async def test_built_files_have_their_own_times(pool, tmp_path):
    busybox_image(tmp_path / "layout")
    began = int(time.time())
    text = f"FROM oci:{tmp_path}/layout\nWORKDIR /made\nCOPY <<EOF /file\ntext\nEOF\n"
    prepared = await TaskImages(pool, ()).prepare(make(tmp_path / "task", text))
    async with pool.lease("one", image=prepared.image) as slot:
        times = (await slot.exec("PATH=/bin stat -c %Y /made /file")).output.split()
    assert len(times) == 2
    assert all(began <= int(each) <= time.time() for each in times), "a ZIP archive takes none before 1980"


async def test_a_damaged_archive_adds_nothing(pool, tmp_path):
    plain = layer(entry("a", os.urandom(100_000)), entry("b", os.urandom(100_000)), entry("c", "c"))
    second = 512 + 100_352
    damaged = {
        "header.tar": (plain, second + 148),
        "content.tar.gz": (gzip.compress(plain), 150_000),
        "content.tar.xz": (lzma.compress(plain), 150_000),
    }
    for name, (data, at) in damaged.items():
        archive = tmp_path / name / "environment" / name
        archive.parent.mkdir(parents=True)
        archive.write_bytes(data[:at] + bytes(byte ^ 0x55 for byte in data[at : at + 8]) + data[at + 8 :])
        task = make(tmp_path / name, f"FROM debian\nADD {name} /added/\n")
        with pytest.raises(TaskBroken, match=rf"step 1/1\b.*{name}"):
            await TaskImages(pool).prepare(task)


async def test_a_climbing_archive_is_refused(pool, tmp_path):
    (tmp_path / "task/environment").mkdir(parents=True)
    (tmp_path / "task/environment/up.tar").write_bytes(layer(entry("../up", "x")))
    task = make(tmp_path / "task", "FROM debian\nADD up.tar /added/\n")
    with pytest.raises(TaskBroken, match=r"names a path outside its folder: \.\./up: '/added'$"):
        await TaskImages(pool).prepare(task)


async def test_a_sparse_archive_takes_no_terabytes(pool, tmp_path):
    says = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str((4 << 30) + 1)}
    (tmp_path / "task/environment").mkdir(parents=True)
    (tmp_path / "task/environment/a.tar").write_bytes(layer(entry("huge", b"0\n".ljust(512, b"\0"), pax=says)))
    task = make(tmp_path / "task", "FROM debian\nADD a.tar /added/\n")
    with pytest.raises(TaskBroken, match=rf"step 1/1: huge: has {(4 << 30) + 1} bytes; at most {4 << 30}"):
        await TaskImages(pool).prepare(task)


async def test_reading_an_archive_blocks_no_loop(pool):
    loop = threading.get_ident()

    class Archive(io.BytesIO):
        def read(self, size=-1):
            assert threading.get_ident() != loop
            return super().read(size)

    packed = gzip.compress(layer(entry("a", "a")) + bytes(1 << 20))
    async with pool.lease("one") as slot:
        await unpack_archive(slot, "/added", Archive(packed))
        assert await slot.read_file("/added/a") == b"a"


@pytest.mark.parametrize(
    "text", ["FROM {}", "FROM debian\nCOPY --from={} /key /", "FROM debian\nRUN --mount=from={},target=/m true"]
)
async def test_no_folder_of_the_host_is_read(pool, tmp_path, text):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("ours")
    task = make(tmp_path / "task", text.format(f"dir:{secret}"))
    prebuilt = make(tmp_path / "prebuilt", "FROM debian", toml=f'[environment]\ndocker_image = "dir:{secret}"\n')
    machine = make(tmp_path / "machine", text.format("dir:/proc/1/root"))
    for each in (task, prebuilt, machine):
        with pytest.raises(TaskBroken, match=r"dir:\S+: a task takes no folder of this machine"):
            await TaskImages(pool, ()).prepare(each)
    (secret / "bin").mkdir()
    (secret / "bin/sh").symlink_to("busybox")
    assert (await TaskImages(pool, ()).prepare(prebuilt)).image  # a root file system is one


async def test_a_mount_covers_for_one_command(pool, tmp_path):
    task = make(
        tmp_path / "task",
        "FROM debian AS one\nRUN echo made > /made\nFROM debian\nWORKDIR /w\n"
        "RUN echo old > given.txt && mkdir -m 711 /c && echo kept > /c/kept && chown 33:44 /c\n"
        "RUN --mount=target=. --mount=from=one,source=/made,target=/in --mount=type=cache,target=/c,uid=7,mode=750 "
        "cat given.txt /in > /seen; stat -c '%u %a' /c >> /seen; ls -A /c >> /seen; echo x > /c/x; echo x > x\n"
        "USER daemon\nRUN <<EOF\n#!/usr/bin/python3\nprint('by', 'python', file=open('/tmp/by', 'w'))\nEOF\n",
    )
    async with working_on(pool, TaskImages(pool), task) as slot:
        script = (
            "cat /seen /w/given.txt /c/* /tmp/by; ls -A /w; stat -c '%u:%g %a' /c; ls -d /.heredocs/* /in* /c.* /w.*"
        )
        seen = (await slot.exec(script, user="root")).output.splitlines()
        assert seen[:9] == ["givenmade", "7 750", "old", "kept", "by python", "given.txt", "33:44 711", *seen[7:9]]
        assert all("No such file" in line for line in seen[7:]), "nothing of a mount is left"


async def test_waiting_for_a_slot_is_not_timed(tmp_path):
    task = make(tmp_path / "task", "FROM debian\nRUN true\n", toml="[environment]\nbuild_timeout_sec = 5.0\n")
    async with pool_for(tmp_path, slots_per_container=1) as pool:
        async with pool.lease("other"):
            build = asyncio.create_task(TaskImages(pool).prepare(task))
            await until(lambda: pool.stats().waiting, "the build waits for the slot")
            end = time.monotonic() + 5
            await until(lambda: time.monotonic() > end, "so long that its time would be over")
        await build


@pytest.mark.parametrize("in_time", [True, False])
async def test_waiting_for_a_builder_is_not_timed(tmp_path, in_time):
    text, limit = f"FROM debian\nRUN sleep {3 if in_time else 100}\n", "[environment]\nbuild_timeout_sec = 0.5\n"
    first, second = make(tmp_path / "first", text), make(tmp_path / "second", text, toml=limit)
    async with pool_for(tmp_path, acquire_timeout_s=30.0 if in_time else 2.0) as pool:
        states = []
        one = asyncio.create_task(TaskImages(pool).prepare(first, lambda state: states.append(state.phase)))
        await until(lambda: "building" in states or one.done(), "the first builds")
        other = asyncio.create_task(TaskImages(pool).prepare(second, lambda state: states.append(state.phase)))
        if in_time:
            assert (await other).image == (await one).image
        else:
            with pytest.raises(ImageUnavailable, match=r"RUN .*sleep 100.* is not done after 2\.5 s"):
                await other
        assert "waiting" in states
        one.cancel()


async def test_a_file_changed_midway_is_not_kept(pool, tmp_path):
    task = make(
        tmp_path / "task",
        "FROM debian\nRUN true\nCOPY given.txt /given\nRUN --mount=source=given.txt,target=/m cat /m\n",
    )
    file, changed = tmp_path / "task/environment/given.txt", []

    def change(state):
        if state.step == 2 and not changed:
            changed.append(file.write_text("changed"))

    images = TaskImages(pool)
    with pytest.raises(TaskBroken, match=r"step 2/3: COPY given.txt /given: a file of the build context changed"):
        await images.prepare(task, progress=change)
    file.write_text("given")
    async with working_on(pool, images, task) as slot:
        assert (await slot.exec("cat /given")).output == "given"


async def test_copies_from_stages_are_as_dockers(pool, tmp_path):
    task = make(
        tmp_path / "task",
        "FROM debian AS made\n"
        "RUN mkdir -p /d/k/in && touch /d/.hidden /d/seen /d/k/keep.txt /d/k/drop.log /d/k/in/drop.log && ln -s d /l\n"
        "FROM debian\nCOPY --from=made /d/* /glob/\nCOPY --from=made /d/[^s]* /but/\nCOPY --from=made /?/s* /one\n"
        "COPY --from=made --exclude=*.log /d/k /excluded/\nCOPY --from=made /l /linked\n",
    )
    async with working_on(pool, TaskImages(pool), task) as slot:
        seen = await slot.exec("cd /; find glob but one excluded linked ! -type d | sort | tr '\\n' ' '")
        assert seen.output.split() == [
            *("but/.hidden", "but/drop.log", "but/in/drop.log", "but/keep.txt"),
            *("excluded/in/drop.log", "excluded/keep.txt"),
            *("glob/.hidden", "glob/drop.log", "glob/in/drop.log", "glob/keep.txt", "glob/seen"),
            *("linked/.hidden", "linked/k/drop.log", "linked/k/in/drop.log", "linked/k/keep.txt", "linked/seen"),
            "one",
        ]
        (tmp_path / "task/environment/Dockerfile").write_text(
            (tmp_path / "task/environment/Dockerfile").read_text().replace("=*.log", "=**/*.log")
        )
        async with working_on(pool, TaskImages(pool), load_task(tmp_path / "task")) as other:
            assert (await other.exec("cd /excluded; find . -type f")).output == "./keep.txt\n"
        none = "FROM debian AS made\nRUN touch /y\nFROM debian\nCOPY --from=made /d/x* /x\nCOPY --from=made /y /d/x* /to/\nCOPY x* /x\n"
        async with working_on(pool, TaskImages(pool), make(tmp_path / "none", none)) as third:
            assert (await third.exec("ls /to; [ -e /x ] || echo none")).output == "y\nnone\n"
        absent = make(tmp_path / "absent", "FROM debian AS made\nFROM debian\nCOPY --from=made /d/x /x\n")
        with pytest.raises(TaskBroken, match=r"COPY --from: /d/x: is not in the stage"):
            await TaskImages(pool).prepare(absent)


async def test_attributes_are_copied_with_files(pool, tmp_path):
    capability = struct.pack("<IIIII", 0x02000000, 1 << 13, 0, 0, 0)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("added/f")
        info.pax_headers = {"SCHILY.xattr.security.capability": capability.decode(), "SCHILY.xattr.user.a": "b"}
        tar.addfile(info)
    script = f"import os; os.makedirs('/s/d'); open('/s/f', 'w'); os.setxattr('/s/d', 'user.d', b'1')\nos.setxattr('/s/f', 'user.n', bytes([0, 255])); os.setxattr('/s/f', 'security.capability', {capability!r})"
    (tmp_path / "environment").mkdir()
    (tmp_path / "environment/tree.tar").write_bytes(packed.getvalue())
    task = make(
        tmp_path,
        f"FROM debian AS made\nRUN <<EOF cat > /x.py\n{script}\nEOF\nRUN python3 /x.py\n"
        "FROM debian\nCOPY --from=made /s /t\nCOPY --from=made --chown=daemon /s/f /f\nADD tree.tar /\n",
    )
    seen = "import os, sys; print(*(f'{p} {n} {os.getxattr(p, n).hex()}' for p in sys.argv[1:] for n in sorted(os.listxattr(p))), sep='\\n')"
    async with working_on(pool, TaskImages(pool), task) as slot:
        listed = await slot.exec(["python3", "-c", seen, "/t/d", "/t/f", "/f", "/added/f"])
    kept = capability.hex()
    assert listed.output.splitlines() == [
        "/t/d user.d 31",
        f"/t/f security.capability {kept}",
        "/t/f user.n 00ff",
        f"/f security.capability {kept}",
        "/f user.n 00ff",
        f"/added/f security.capability {kept}",
        "/added/f user.a 62",
    ]


async def test_parents_of_a_stage_are_its_own(pool, tmp_path):
    task = make(
        tmp_path / "task",
        "FROM debian AS made\nRUN mkdir -p /s/a/b/c && touch /s/a/b/f /s/a/b/c/g && chown 5:6 /s/a && chmod 750 /s/a && chmod 2711 /s/a/b/c\n"
        "FROM debian\nRUN mkdir -p -m 700 /w/s\nCOPY --parents --from=made /s/a/b/f /t/\nCOPY --parents --from=made /s/./a/b/c /u\n"
        "COPY --parents --from=made --chown=7:8 /s/a/./b/? /v/\nCOPY --parents --from=made /s/a/b/f /w\n",
    )
    async with working_on(pool, TaskImages(pool), task) as slot:
        seen = await slot.exec("cd /; find t u v w | sort | xargs stat -c '%n %a %u:%g'")
        assert seen.output.splitlines() == [
            *("t 755 0:0", "t/s 755 0:0", "t/s/a 750 5:6", "t/s/a/b 755 0:0", "t/s/a/b/f 644 0:0"),
            *("u 755 0:0", "u/a 750 5:6", "u/a/b 755 0:0", "u/a/b/c 2711 0:0", "u/a/b/c/g 644 0:0"),
            *("v 755 7:8", "v/b 755 7:8", "v/b/c 2711 7:8", "v/b/c/g 644 7:8", "v/b/f 644 7:8"),
            *("w 755 0:0", "w/s 700 0:0", "w/s/a 750 5:6", "w/s/a/b 755 0:0", "w/s/a/b/f 644 0:0"),
        ]


async def test_a_stages_large_file_stays_whole(pool, tmp_path):
    task = make(
        tmp_path / "task",
        "FROM debian AS made\nRUN mkdir /s && truncate -s 40M /s/big && chown 5:6 /s/big && chmod 4751 /s/big && "
        "ln /s/big /s/hard && touch -d @1000000000 /s/big\nFROM debian\nCOPY --from=made /s /t\n",
    )
    async with working_on(pool, TaskImages(pool), task) as slot:
        seen = await slot.exec("stat -c '%u:%g %a %Y %s %h' /t/big; cmp /t/big /t/hard")
        assert seen.output == f"5:6 4751 1000000000 {40 << 20} 2\n"


async def test_a_file_beyond_a_message_is_copied(pool, tmp_path):
    make(tmp_path / "task")
    (tmp_path / "task/environment/Dockerfile").write_text(
        "FROM debian\nCOPY . /all\nCOPY --chown=daemon --chmod=640 large /own\n"
    )
    for where in ("environment", "tests"):
        with (tmp_path / "task" / where / "large").open("wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)
            file.write(b"begin")
    task = load_task(tmp_path / "task")
    async with working_on(pool, TaskImages(pool), task) as slot:
        seen = await slot.exec("cd /all; stat -c '%s %U %a' large given.txt /own; head -c 5 large; cmp large /own")
        size = MAX_FILE_BYTES + 1
        assert seen.output == f"{size} root 644\n5 root 644\n{size} daemon 640\nbegin"
        await workspace.verify(slot, task)
        assert (await slot.exec("stat -c %s /tests/large")).output == f"{size}\n"


@pytest.mark.parametrize("form", ["oci-archive", "docker-archive"])
async def test_onbuild_and_shell_hold(pool, tmp_path, form):
    config = {
        "OnBuild": ["COPY given.txt /opt/given", "RUN cat /opt/given > /opt/seen"],
        "Shell": ["/bin/sh", "-c", 'SHELL_OF=image; eval "$0"'],
    }
    busybox_image(tmp_path / "layout", config=config)
    saved = f"{form}:{tmp_path}/saved"
    skopeo = ["skopeo", "--insecure-policy", "copy", "-q", f"oci:{tmp_path}/layout:image", saved]
    await asyncio.to_thread(subprocess.run, skopeo, check=True)
    stages = f"FROM {saved} AS one\nRUN cat /opt/seen > /last; echo $SHELL_OF >> /last\nFROM one\nRUN echo $SHELL_OF >> /last\n"
    task = make(tmp_path / "task", stages)
    async with working_on(pool, TaskImages(pool), task) as slot:
        assert (await slot.exec("cat /last")).output == "givenimage\nimage\n"


async def test_what_containers_find(pool, tmp_path):
    config = {
        "Volumes": {"/srv/data": {}, "/etc": {}},
        "Healthcheck": {
            "Test": ["CMD-SHELL", "up"],
            "Interval": 5_000_000_000,
            "StartPeriod": 1_500_000_000,
            "Retries": 4,
        },
        "OnBuild": ["RUN <<EOF\nls /srv > /seen 2>&1 || true\nEOF"],
    }
    busybox_image(tmp_path / "layout", config=config)
    image = f"oci:{tmp_path}/layout"
    task = make(tmp_path / "task", f"FROM {image}\nRUN true\n")
    check = HealthConfig(test=("CMD-SHELL", "up"), interval_s=5, start_period_s=1.5, retries=4)
    async with working_on(pool, TaskImages(pool), task) as slot:
        assert "data" not in (await slot.exec("cat /seen")).output, "a build of it doesn't"
        assert (await slot.exec("stat -c '%a %u' /srv/data")).output == "755 0\n"
    (tmp_path / "task/task.toml").write_text(f'version = "1.0"\n[environment]\ndocker_image = "{image}"\n')
    prepared = await TaskImages(pool).prepare(load_task(tmp_path / "task"))
    assert prepared.task.recipe.settings.healthcheck == check
    async with pool.lease("one", image=prepared.image) as slot:
        assert (await slot.exec("ls -d /srv/data")).output == "/srv/data\n"


async def test_through_links_to_what_is_not_there_yet(pool, tmp_path):
    """The folder a link names is made; a link that leads nowhere is refused."""
    linked = "FROM debian\nRUN mkdir -p /e/f /real && ln -s ../up /e/f/k && ln -s real/deep /m && ln -s o /o\n"
    task = make(tmp_path / "task", f"{linked}COPY Dockerfile /e/f/k/\nCOPY --chmod=0 Dockerfile /m/x/y\nWORKDIR /m/w\n")
    async with working_on(pool, TaskImages(pool), task) as slot:
        said = await slot.exec("pwd -P; ls /e/up /real/deep /up; stat -c '%a %F' /real/deep/x/y /e/f/k /m")
        assert said.output.startswith("/real/deep/w\n"), said.output
        assert "/e/up:\nDockerfile\n" in said.output
        assert "/real/deep:\nw\nx\n" in said.output
        assert said.output.endswith("0 regular file\n777 symbolic link\n777 symbolic link\n"), said.output
    looped = make(tmp_path / "looped", f"{linked}COPY Dockerfile /o/\n")
    with pytest.raises(TaskBroken, match="too many links"):
        async with working_on(pool, TaskImages(pool), looped):
            pass


async def test_caches_last_for_a_stage(pool, tmp_path):
    mount = "--mount=type=cache,id=x,mode=0750,uid=3"
    task = make(
        tmp_path / "task",
        f"FROM debian AS one\nRUN {mount},target=/c echo 1 > /c/a; mkdir -m 700 /c/d; touch /etc/made\n"
        f"RUN {mount},target=/e/f cat /e/f/a > /seen; stat -c '%a %u' /e/f /e/f/d >> /seen; echo 2 > /e/f/b\n"
        "RUN --mount=type=cache,target=/c,id=x ls -A /c >> /seen\nRUN mkdir /c && touch /c/own\n"
        f"FROM one AS two\nRUN {mount},target=/c cat /c/* >> /seen; rm /c/a\nFROM two\nRUN {mount},target=/c ls -A /c >> /seen\n",
    )
    async with working_on(pool, TaskImages(pool), task) as slot:
        assert (await slot.exec("cat /seen")).output == "1\n750 3\n700 0\n1\n2\nb\nd\n", "other settings: another cache"
        assert (await slot.exec("ls -A /c; ls -A / | grep -E 'cache|^e$'")).output == "own\n"


async def test_a_command_may_be_offline(tmp_path):
    text = "FROM debian\nRUN env > /with\nRUN --network=none env > /without\n"
    async with (
        pool_for(tmp_path, allow_network=True) as pool,
        working_on(pool, TaskImages(pool), make(tmp_path / "task", text)) as slot,
    ):
        assert (await slot.exec("grep -l HTTP_PROXY /with /without")).output == "/with\n"


async def test_an_exec_form_needs_no_shell(pool, tmp_path):
    """As on images that have a shell elsewhere, or none: `gcr.io/distroless/static:debug`."""
    files = [
        folder("tools"),
        entry("tools/busybox", Path(BUSYBOX).read_bytes(), mode=0o755),
        link("tools/sh", "busybox"),
    ]
    layout(tmp_path / "layout", layer(*files), config={"Env": ["PATH=/tools"]})
    steps = 'SHELL ["/tools/sh", "-c"]\nRUN echo $0 >/shell\nRUN ["busybox", "touch", "/a b", "/$PATH"]\n'
    task = make(tmp_path / "task", f"FROM oci:{tmp_path}/layout\n{steps}")
    prepared = await TaskImages(pool).prepare(task)
    async with pool.lease("one", image=prepared.image) as slot:
        seen = await slot.exec(["/tools/busybox", "cat", "/shell", "/a b", "/$PATH"])
        assert (seen.exit_code, seen.output) == (0, "/tools/sh\n")
    task = make(tmp_path / "task", f'FROM oci:{tmp_path}/layout\nRUN ["/nothing"]\n')
    with pytest.raises(TaskBroken, match=r"step 1/1: `/nothing`: No such file or directory: /nothing"):
        await TaskImages(pool).prepare(task)


async def test_a_stages_copy_lacks_the_slots_own(pool, tmp_path):
    busybox_image(tmp_path / "layout")
    text = f"FROM oci:{tmp_path}/layout AS first\nRUN mkdir -m 700 /private; echo new > /private/f\nFROM scratch\nCOPY --from=first / /\n"
    task = make(tmp_path / "task", text + "COPY . /\n")
    prepared = await TaskImages(pool, ()).prepare(task)
    async with pool.lease("one", image=prepared.image) as slot:
        r = await slot.exec(
            "cat /private/f /srv/app/text /given.txt; stat -c ' %a' /private", workdir="/", env={"PATH": "/bin"}
        )
        assert r.output == "new\nhellogiven 700\n"
        with tarfile.open(fileobj=io.BytesIO(await slot.download("/"))) as tar:
            names = tar.getnames()
        assert {"./etc/passwd", "./private/f"} <= set(names)
        assert not [name for name in names if name.startswith(("./.atropos/", "./proc/", "./etc/ld.so.preload"))]


async def test_a_docker_image_is_the_workspace(tmp_path, images):
    busybox_image(tmp_path / "layout", user="app")
    images.push(tmp_path / "layout", "whole:1")
    toml = f'[environment]\ndocker_image = "{images.host}/whole:1"\n'
    async with pool_for(tmp_path, images) as pool:
        built = TaskImages(pool)
        async with working_on(pool, built, make(tmp_path / "loose", toml=toml)) as slot:
            assert (await slot.exec("cat text given.txt; id -u; pwd")).output == "hellogiven1000\n/srv/app\n"
        beside = make(tmp_path / "beside", "FROM nowhere.invalid/x\nRUN false\n", toml=toml)
        async with working_on(pool, built, beside) as slot:
            assert (await slot.exec("cat text; ls")).output == "hellotext\n", "its files are in the image already"
        unbuildable = make(tmp_path / "unbuildable", "FROM nowhere.invalid/x\nRUN --network=host true\n", toml=toml)
        async with working_on(pool, built, unbuildable) as slot:
            assert (await slot.exec("cat text; ls")).output == "hellotext\n", (
                "a Dockerfile that isn't built may say anything"
            )
        with pytest.raises(TaskBroken, match=r"unbuildable: .*Dockerfile:2: .*--network"):
            await TaskImages(pool, (f"{images.host}/*",)).prepare(unbuildable)
        absent = make(tmp_path / "absent", toml=toml.replace("whole:1", "absent:1"))
        standing = TaskImages(pool, (f"{images.host}/absent*",))
        async with working_on(pool, standing, absent) as slot:
            assert (await slot.exec("cat given.txt; pwd")).output == "given/workspace\n"


async def test_a_missing_image_is_no_tasks_fault(tmp_path, images):
    """Nor of what is in its slot: a registry that is down, or that gets the image later, says nothing about the task."""
    busybox_image(tmp_path / "layout")
    late = make(tmp_path / "late", f"FROM {images.host}/late:1\nRUN echo built > it\n")
    down = make(tmp_path / "down", "FROM 127.0.0.1:1/x\n")
    states = []
    async with pool_for(tmp_path, images) as pool:
        built = TaskImages(pool)
        with pytest.raises(ImageUnavailable, match=r"down: .*127.0.0.1:1/x:latest: pulling: .*connection refused"):
            await built.prepare(down, states.append)
        assert [(state.source, state.phase) for state in states[-1:]] == [("down", "failed")]
        with pytest.raises(ImageUnavailable, match=r"late: image .*late:1: pulling: .*manifest unknown"):
            await built.prepare(late)
        images.push(tmp_path / "layout", "late:1")
        async with working_on(pool, built, late) as slot:
            assert (await slot.exec("cat text it")).output == "hellobuilt\n"


async def test_a_build_starts_a_container(tmp_path):
    async with pool_for(tmp_path, min_containers=0) as pool:
        built = TaskImages(pool)
        task = make(tmp_path / "task", "FROM debian\nRUN echo built > it\n")
        async with working_on(pool, built, task) as slot:
            assert (await slot.exec("cat it")).output == "built\n"


async def test_busybox_is_enough_for_a_verifier(pool, tmp_path):
    busybox_image(tmp_path / "layout")
    image = f'docker_image = "oci:{tmp_path}/layout:image"\n'
    test = "[ -e left/done ] && [ ! -e left/a.log ] && [ ! -e text ] && echo 1 > /logs/verifier/reward.txt"
    toml = f'artifacts = [{{source = "/srv/app", exclude = ["*.log"]}}]\n[environment]\n{image}[verifier.environment]\n{image}'
    task = make(tmp_path / "task", toml=toml, files={"tests/test.sh": f"#!/bin/sh\n{test}\n"})
    async with contextlib.AsyncExitStack() as slots:
        prepared = await TaskImages(pool).prepare(task)
        slot = await slots.enter_async_context(pool.lease("agent", image=prepared.image))
        await workspace.enter(slot, prepared.task)
        await slot.exec("rm text; mkdir left; echo > left/done; echo > left/a.log")

        async def fresh():
            return await slots.enter_async_context(pool.lease("judge", image=prepared.image))

        assert (await workspace.verify(slot, prepared.task, fresh=fresh)).reward == 1.0


async def test_servers_stay_without_python(pool, tmp_path):
    busybox_image(tmp_path / "layout")
    test = '[ "$(busybox wget -qO- 127.0.0.1:8123/text)" = hello ] && ! busybox ps | busybox grep -q "sleep 100[0]"'
    task = make(
        tmp_path / "task",
        toml=f'[environment]\ndocker_image = "oci:{tmp_path}/layout:image"\n',
        files={"tests/test.sh": f"#!/bin/sh\n{test} && echo 1 > /logs/verifier/reward.txt\n"},
    )
    async with working_on(pool, TaskImages(pool), task) as slot:
        await slot.exec("busybox httpd -p 127.0.0.1:8123 -h /srv/app; busybox sleep 1000 >/dev/null 2>&1 &")
        assert (await workspace.verify(slot, task, mode="shared")).reward == 1.0


@needs("curl")
async def test_add_fetches_what_egress_allows(tmp_path):
    good = f"sha256:{hashlib.sha256(b'fetched').hexdigest()}"
    step = Download("http://localhost:8000/name.bin", "/srv/name.bin", good, owner="7:8")
    async with pool_for(tmp_path, allow_network=True) as pool:
        async with pool.lease("site") as site, pool.lease("build") as slot:
            serve = "mkdir /tmp/site; cd /tmp/site; printf fetched > name.bin; python3 -m http.server 8000 >/dev/null 2>&1 &"
            await site.exec(f"{serve} until curl -so /dev/null localhost:8000; do sleep 0.05; done")
            await steps.add_download(slot, step, await steps.fetch(site, step, 20))
            assert (
                await slot.exec("cat /srv/name.bin; stat -c ' %a %u:%g' /srv/name.bin")
            ).output == "fetched 600 7:8\n"
            with pytest.raises(TaskBroken, match=f"its checksum is {good}, not sha256:00"):
                await steps.fetch(site, replace(step, checksum="sha256:" + "0" * 64), 20)
            unpacks = replace(step, target="/t/", unpack=True)
            for data in (gzip.compress(layer(entry("in", "side", owner=(3, 4)))), b"no archive"):
                await steps.add_download(slot, unpacks, data)
            assert (await slot.exec("cd /t; cat in name.bin; stat -c ' %u:%g' . in")).output == (
                "sideno archive 7:8\n 3:4\n"
            )
        own = make(tmp_path / "own", "FROM scratch\nADD http://127.0.0.2:1/x /x\n")
        with pytest.raises(TaskBroken, match=r"own: ADD http://127.0.0.2:1/x ended with 1: .*egress refused"):
            await TaskImages(pool).prepare(own)


async def test_builds_reach_all_containers(tmp_path, images):
    busybox_image(tmp_path / "layout")
    task = make(
        tmp_path / "task", f"FROM oci:{tmp_path}/layout\nRUN echo made > made; rm text\nCOPY given.txt /srv/app/\n"
    )
    async with pool_for(tmp_path / "one") as one, pool_for(tmp_path / "two") as two:
        prepared = await TaskImages(one).prepare(task)
        (giver,), (taker,) = one.links.values(), two.links.values()
        last = await giver.client.images.find(prepared.image)
        first = await giver.client.images.find(last.parent_source)
        with pytest.raises(ImageUnavailable, match="its parent is not on this server's host"):
            await giver.client.images.copy(last, taker.client.images)
        assert first.parent_source == (await two.prepare(f"oci:{tmp_path}/layout")).source
        assert await giver.client.images.copy(first, taker.client.images) == first
        assert await giver.client.images.copy(last, taker.client.images) == last
        async with two.lease("agent", image=prepared.image) as slot:
            assert (await slot.exec("cd /srv/app; ls; cat made")).output == "given.txt\nmade\nmade\n"
