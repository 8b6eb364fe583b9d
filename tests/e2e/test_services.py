"""Tasks of several services on real slots: each has its own, they find each other by name, and end together."""

import asyncio
import errno
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from atropos.config import ImageStoreSettings
from atropos.errors import LeaseExpired, NotSupported, SandboxError, SlotLost
from atropos.resources import Resources
from atropos.sandbox.programs.gateway import OWN_ADDRESS
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tasks import services, workspace
from atropos.tasks.attempt import TaskRun
from atropos.tasks.errors import TaskBroken
from atropos.tasks.fit import Room, fit
from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.wire import LeaseLimits
from tests.files import write_files
from tests.processes import descendants
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/services/order-totals"
SERVER = """
import http.server, os, pathlib, socket, sys, time
time.sleep(float(os.environ.get("SLEEP", 0)))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = pathlib.Path(os.environ.get("ROOT", "/srv"), self.path.lstrip("/"))
        body = path.read_bytes() if path.is_file() else os.environ["NAME"].encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
print("ready", flush=True)
http.server.HTTPServer(("", int(os.environ.get("PORT", 80))), Handler).serve_forever()
"""
STORE = """
import socketserver
values = {}
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            word, key, *rest = line.decode().split()
            if word == "SET":
                values[key] = rest[0]
            self.wfile.write((values.get(key, "nil") + "\\n").encode())
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
Server(("", 6379), Handler).serve_forever()
"""
HUNGRY = """
import os, socket, sys
if sys.argv[1] != "before":
    listening = socket.create_server(("", 80))
    while asked := listening.accept()[0]:
        if sys.argv[1] == "itself" or not os.fork():
            break
        os.wait()
        asked.close()
b"x" * (300 << 20)
"""
ASK = "python3 -c 'import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode().strip())' "
HEALTHY = 'healthcheck: {test: [CMD-SHELL, "python3 -c \'import urllib.request as u; u.urlopen(\\"http://localhost\\")\'"], interval: 1s, retries: 30}'


@pytest.fixture(scope="module")
async def pool(tmp_path_factory):
    store = ImageStoreSettings(folder=str(tmp_path_factory.mktemp("store")))
    config = SlotPoolConfig(
        backend="local",
        slots_per_container=8,
        min_containers=1,
        max_containers=1,
        allow_network=True,
        image_store=store,
    )
    async with SlotPool(config) as running:
        yield running
        stats = running.stats()
        assert (stats.leased, stats.retired) == (0, 0), "a slot was not given back"


@pytest.fixture
def make(tmp_path):
    def make(text, **files):
        folder = tmp_path / "demo"
        write_files(
            folder,
            {
                "task.toml": 'version = "1.0"\n',
                "instruction.md": "Do it.\n",
                "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
                "environment/docker-compose.yaml": f"services:\n{text}",
                "environment/server/Dockerfile": "FROM debian:12\nCOPY *.py /\nRUN mkdir -p /srv && echo page > /srv/page\n"
                'CMD ["python3", "/server.py"]\n',
                "environment/server/server.py": SERVER,
                "environment/server/store.py": STORE,
                "environment/server/hungry.py": HUNGRY,
                "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
                **files,
            },
        )
        task = load_task(folder)
        return fit(task, Room(Resources(memory_mib=1024, disk_mib=512), most_mib=8192)).sized(task)

    return make


class Started:
    """A task's slots, with its services started."""

    def __init__(self, pool, task, network=True):
        self.pool, self.task, self.network, self.slot = pool, task, network, None

    async def __aenter__(self):
        images = TaskImages(self.pool)
        prepared = await images.prepare(self.task)
        network = self.network and not self.task.offline
        self.slot = await self.pool.acquire(
            self.task.name, image=prepared.image, limits=prepared.task.limits, network=network
        )
        try:
            await workspace.enter(self.slot, prepared.task)
            await services.start(self.slot, prepared.task, images, network=self.network)
        except BaseException:
            await self.slot.release()
            raise
        return self.slot

    async def __aexit__(self, *_):
        await self.slot.release()


async def until_all_free(pool):
    [link] = pool.links.values()
    while (await link.client.status()).free < 8:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def said(slot, command):
    result = await slot.exec(command, timeout_s=60)
    return result.output.strip()


async def test_web_service_and_store(pool, make):
    task = make(
        f"""
  main: {{build: ., depends_on: {{web: {{condition: service_healthy}}}}}}
  web: {{build: server, environment: {{NAME: web}}, {HEALTHY}, depends_on: [store]}}
  store: {{build: server, command: python3 /store.py}}
""",
        **{
            "solution/solve.sh": "#!/bin/bash\nexec 3<>/dev/tcp/store/6379; echo SET answer 42 >&3\n",
            "tests/test.sh": f"""#!/bin/bash
exec 3<>/dev/tcp/store/6379; echo GET answer >&3; read -r answer <&3
[ "$answer" = 42 ] && [ "$({ASK} http://web)" = web ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
""",
        },
    )
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        assert await play(pool, task, agent) == reward
        await until(lambda: pool.stats().leased == 0, "they are released together")


async def test_only_its_solution_solves_it(pool):
    task = load_task(EXAMPLE)
    assert [each.name for each in task.beside] == ["order-totals/orders", "order-totals/rates"]
    task = fit(task, Room.of(pool.config)).sized(task)
    assert [await play(pool, task, agent) for agent in ("oracle", "nop")] == [1, 0]


async def test_each_has_its_own_ports_and_loopback(pool, make):
    task = make(
        f"""
  main: {{build: ., command: [sh, -c, "NAME=own PORT=8000 python3 /mine.py"], volumes: ["./server/server.py:/mine.py"]}}
  one: {{build: server, environment: {{NAME: one}}, container_name: first, {HEALTHY}}}
  two: {{build: server, environment: {{NAME: two}}, {HEALTHY}}}
"""
    )
    async with Started(pool, task) as slot:
        assert await eventually(slot, f"{ASK} http://main:8000") == "own"
        assert await said(slot, f"{ASK} http://one; {ASK} http://first; {ASK} http://two") == "one\none\ntwo"
        assert "refused" in await said(slot, f"{ASK} http://localhost")
        names = {name: each for each in slot.group for name in ("one", "two") if name == await said(each, "echo $NAME")}
        assert (
            await said(names["one"], f"{ASK} http://two; {ASK} http://localhost; {ASK} http://main:8000")
            == "two\none\nown"
        )
        proxies = await said(names["one"], "echo $no_proxy")
        assert {"main", "one", "first", "two"} <= {*proxies.split(",")}, "a proxy is asked for none of them"


async def eventually(slot, command):
    return await said(slot, f"for n in $(seq 300); do {command} 2> /dev/null && break; sleep 0.1; done")


async def test_groups_do_not_reach_each_other(pool, make):
    text = f"""
  main: {{build: .}}
  web: {{build: server, environment: {{NAME: NUMBER}}, {HEALTHY}}}
"""
    async with Started(pool, make(text.replace("NUMBER", "first"))) as first:
        async with Started(pool, make(text.replace("NUMBER", "second"))) as second, pool.lease("alone") as alone:
            assert [await said(slot, f"{ASK} http://web") for slot in (first, second)] == ["first", "second"]
            address = (await said(first, "getent hosts web")).split()[0]
            for slot in (alone, second.group[1]):
                found = await said(slot, f"for n in $(seq 8 20); do {ASK} http://{address.rpartition('.')[0]}.$n; done")
                assert "first" not in found
        assert await said(first, f"{ASK} http://web") == "first", "another group's end is its own"


async def test_volumes_are_shared_as_they_say(pool, make):
    task = make(
        """
  main: {build: ., volumes: ["pages:/pages:ro", "./seed:/seed", "work:/app/work"]}
  web:
    build: server
    environment: {NAME: web}
    volumes: ["pages:/srv", "./seed:/var/seed:ro", "./seed/one.txt:/etc/one.txt:ro", "work:/work"]
""",
        **{"environment/seed/one.txt": "1\n", "environment/seed/sub/two.txt": "2\n"},
    )
    async with Started(pool, task) as slot:
        web = slot.group[1]
        assert await said(slot, "cat /pages/page") == "page", "what the image has there"
        assert await said(slot, "cat /seed/one.txt /seed/sub/two.txt") == "1\n2"
        await said(web, "echo more > /srv/more; echo 3 > /work/three")
        assert await said(slot, "cat /pages/more /app/work/three; ls /pages") == "more\n3\nmore\npage"
        for command in ("echo x > /pages/x", "rm /pages/page"):
            assert "Read-only" in await said(slot, command)
        assert "Read-only" in await said(web, "echo x > /var/seed/x; echo x > /etc/one.txt")
        assert await said(slot, "echo 9 > /seed/one.txt; cat /seed/one.txt") == "9"
        assert await said(web, "cat /var/seed/one.txt /etc/one.txt") == "9\n9"
        assert await said(slot, "rm -rf /app/work/*; ls /app/work") == ""
        assert await said(web, "ls /work") == ""
    assert (Path(task.context) / "seed/one.txt").read_text() == "1\n", "the task's own files stay"


async def test_volumes_lie_in_each_other(pool, make):
    task = make(
        """
  main: {build: ., volumes: ["outer:/data", "./seed/one.txt:/data/inner/one.txt", "deep:/data/inner/deep"]}
  web: {build: server, environment: {NAME: web}, volumes: ["outer:/outer", "deep:/deep", "./seed:/seed:ro"]}
""",
        **{"environment/seed/one.txt": "1\n"},
    )
    async with Started(pool, task) as slot:
        web = slot.group[1]
        await said(slot, "echo 3 > /data/inner/deep/three; echo 2 > /data/inner/two")
        assert await said(web, "cat /deep/three /outer/inner/two /seed/one.txt") == "3\n2\n1"


async def test_nested_volume_has_own_users(pool, make):
    task = make(
        """
  main: {build: ., volumes: ["shared:/deep/down/here", "code:/app"]}
  grader:
    build: server
    environment: {NAME: grader}
    volumes: ["shared:/data", "hidden:/data/hidden", "code:/srv:ro", "kept:/srv/kept"]
""",
        **{
            "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nRUN mkdir /app/kept\n",
            "environment/server/Dockerfile": "FROM debian:12\nCOPY *.py /\nRUN mkdir -p /srv/kept /data/hidden && "
            'echo 42 > /srv/kept/answer\nCMD ["python3", "/server.py"]\n',
        },
    )
    async with Started(pool, task) as slot:
        grader = slot.group[1]
        await said(grader, "echo secret > /data/hidden/answer; echo open > /data/open")
        assert await said(grader, "cat /data/hidden/answer /srv/kept/answer") == "secret\n42"
        assert await said(slot, "cat /deep/down/here/open; ls /deep/down/here/hidden") == "open"
        assert await said(slot, "ls -A /app/kept") == ""
        assert "/hidden" not in await said(slot, "cat /proc/self/mountinfo")


async def test_volumes_of_one_service(pool, make):
    task = make(
        """
  main: {build: ., volumes: ["./seed:/app/seed:ro", "./seed/one.txt:/etc/one.txt", "work:/app/work"]}
""",
        **{"environment/seed/one.txt": "1\n"},
    )
    async with Started(pool, task) as slot:
        assert await said(slot, "cat seed/one.txt /etc/one.txt; ls -A work") == "1\n1"
        assert "Read-only" in await said(slot, "echo 2 > seed/one.txt")
        assert await said(slot, "echo 2 > /etc/one.txt; cat seed/one.txt") == "2"


async def test_tmpfs_and_env_files(pool, make):
    task = make(
        f"""
  main: {{build: .}}
  web: {{build: server, env_file: web.env, tmpfs: ["/srv", "/own:mode=700"], volumes: ["pages:/srv/pages"], {HEALTHY}}}
""",
        **{"environment/web.env": "NAME='of a file' # a remark\n"},
    )
    async with Started(pool, task) as slot:
        assert await said(slot, f"{ASK} http://web") == "of a file"
        assert await said(slot.group[1], "ls -A /srv; stat -c '%a %U' /srv /own") == "pages\n1777 root\n700 root"


async def test_an_image_says_what_is_healthy(pool, make):
    check = """import urllib.request as u; u.urlopen("http://localhost")"""
    task = make(
        """
  main: {build: ., depends_on: {web: {condition: service_healthy}}}
  web: {build: {context: server, dockerfile: checked}, environment: {NAME: web, SLEEP: 2}, healthcheck: {interval: 1s}}
""",
        **{
            "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nHEALTHCHECK CMD false\n",
            "environment/server/checked": "FROM debian:12\nCOPY *.py /\n"
            f'HEALTHCHECK --interval=1h --retries=60 CMD python3 -c \'{check}\'\nCMD ["python3", "/server.py"]\n',
        },
    )
    async with Started(pool, task) as slot:
        assert await said(slot, f"{ASK} http://web") == "web"
    with pytest.raises(TaskBroken, match="service web has no healthcheck"):
        async with Started(
            pool,
            make(
                "  main: {build: ., depends_on: {web: {condition: service_healthy}}}\n"
                "  web: {build: server, environment: {NAME: web}}\n"
            ),
        ):
            pass


async def test_services_are_collected_from(pool, make):
    task = make(
        f"  main: {{build: .}}\n  web: {{build: server, environment: {{NAME: web}}, {HEALTHY}}}\n",
        **{
            "task.toml": 'version = "1.0"\nartifacts = [{source = "/var/state", service = "web"}]\n'
            '[verifier]\nenvironment_mode = "separate"\n[[verifier.collect]]\nservice = "web"\n'
            'command = "install -o daemon /dev/null /var/state"\n[[verifier.collect]]\nservice = "web"\nuser = "daemon"\n'
            'command = "echo $NAME $(id -un) > /var/state"\n',
            "tests/test.sh": '[ "$(cat /var/state)" = "web daemon" ] && echo 1 > /logs/verifier/reward.txt\n',
        },
    )
    assert await play(pool, task) == 1


async def test_networks_keep_services_apart(pool, make):
    task = make(
        f"""
  main: {{build: ., networks: [front]}}
  api: {{build: server, environment: {{NAME: api}}, networks: [front, back], {HEALTHY}}}
  db: {{build: server, environment: {{NAME: db}}, networks: {{back: {{aliases: [store]}}}}, {HEALTHY}}}
"""
    )
    async with Started(pool, task) as slot:
        assert await said(slot, f"{ASK} http://api; getent hosts db store") == "api"
        _, api, db = slot.group
        assert await said(api, f"{ASK} http://store; {ASK} http://db; getent hosts main | wc -l") == "db\ndb\n1"
        address = (await said(api, "getent hosts db")).split()[0]
        assert "No route to host" in await said(slot, f"echo x > /dev/tcp/{address}/80")
        assert await said(db, f"{ASK} http://api; getent hosts main") == "api"


async def test_no_address_leads_to_a_service_apart(pool, make):
    task = make(
        f"""
  main: {{build: ., networks: [front]}}
  api: {{build: server, environment: {{NAME: api}}, networks: [front, back], {HEALTHY}}}
  db: {{build: server, environment: {{NAME: db}}, networks: [back], {HEALTHY}}}
networks: {{back: {{internal: true}}}}
"""
    )
    hears = "import socket; s = socket.socket(2, 2); s.bind(('', 5555)); open('/heard', 'wb').write(s.recv(9))"
    async with Started(pool, task) as slot:
        _, api, db = slot.group
        heard = await db.start(["python3", "-c", hears])
        to = (await said(api, "getent hosts db")).split()[0]
        await said(db, "until grep -q :15B3 /proc/net/udp; do sleep 0.05; done")
        send = "import socket, sys; s = socket.socket(2, 2); s.bind((sys.argv[1], 0)); s.sendto(sys.argv[2].encode(), "
        send += f"('{to}', 5555))"
        await said(slot, f'python3 -c "{send}" {OWN_ADDRESS} main')
        await said(api, f'python3 -c "{send}" 0.0.0.0 api')
        assert await heard.wait(60) == 0
        assert await said(db, "cat /heard") == "api"


async def test_other_hosts_have_names(pool, make):
    task = make(
        f"""
  main: {{build: ., extra_hosts: ["own.example:127.0.0.5", "up:host-gateway"]}}
  web: {{build: server, environment: {{NAME: web}}, extra_hosts: {{self.example: 127.0.0.1}}, {HEALTHY}}}
"""
    )
    async with Started(pool, task) as slot:
        assert await said(slot.group[1], f"{ASK} http://self.example") == "web", "no proxy is asked for it"
        assert await said(slot, f"{ASK} http://web; getent hosts own.example") == "web\n127.0.0.5       own.example"
        assert (await slot.exec(f"{ASK} http://up", timeout_s=60)).exit_code == 1, "no slot reaches its host"


async def test_a_job_ends_before_what_needs_it(pool, make):
    task = make(
        """
  main: {build: ., depends_on: {web: {condition: service_started}}}
  job: {build: server, command: [sh, -c, "sleep 1; echo done > /shared/mark"], volumes: ["shared:/shared"]}
  web:
    build: server
    command: [sh, -c, "cp /shared/mark /srv/mark; exec python3 /server.py"]
    environment: {NAME: web}
    volumes: ["shared:/shared:ro"]
    depends_on: {job: {condition: service_completed_successfully}}
"""
    )
    async with Started(pool, task) as slot:
        assert await eventually(slot, f"{ASK} http://web/mark") == "done"


async def test_what_ends_is_started_again(pool, make):
    again = 'command: [sh, -c, "echo x >> /count; [ $(wc -l < /count) -gt 2 ] && exec python3 /server.py; exit 3"]'
    task = make(
        f"""
  main: {{build: .}}
  web: {{build: server, environment: {{NAME: web}}, restart: on-failure, {again}, {HEALTHY}}}
"""
    )
    async with Started(pool, task) as slot:
        assert await said(slot, f"{ASK} http://web") == "web"
        assert await said(slot.group[1], "cat /count") == "x\nx\nx"


@pytest.mark.parametrize(
    ("service", "why"),
    [
        (
            "{build: server, environment: {NAME: web}, healthcheck: {test: 'echo sick; false', interval: 1s, retries: 2}}",
            "(?s)service web did not become healthy: its healthcheck ended with 1: sick: ready",
        ),
        (
            "{build: server, command: sleep 99, healthcheck: {test: sleep 99, interval: 1s, timeout: 2s, retries: 2}}",
            "service web did not become healthy: its healthcheck",
        ),
        (
            "{build: server, command: [sh, -c, 'echo no configuration; exit 7'], healthcheck: {test: 'false'}}",
            "service web ended with 7: no configuration",
        ),
        ("{build: server, command: /nothing}", "service web can't start /nothing"),
        ("{image: debian:12}", "service web has nothing to start"),
        ("{build: server, user: nobody-here, environment: {NAME: web}}", "there is no user 'nobody-here'"),
    ],
)
async def test_a_service_that_fails_breaks_the_task(pool, make, service, why):
    with pytest.raises(TaskBroken, match=why):
        async with Started(pool, make(f"  main: {{build: .}}\n  web: {service}\n")):
            pass
    await until(lambda: pool.stats().leased == 0)


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("data", "/etc/passwd", "Not a directory"),
        ("data", "/etc/passwd/below", "Not a directory"),
        ("data", "/proc/nothing", "No such file or directory"),
        ("data", "/dev/nothing", "Read-only file system"),
        ("./server/server.py", "/app", "Is a directory"),
    ],
)
async def test_impossible_volume_is_the_task_s(pool, make, source, target, why):
    task = make(
        f"""
  main: {{build: ., depends_on: [web], volumes: ["{source}:{target}"]}}
  web: {{build: server, environment: {{NAME: web}}, volumes: ["{source}:/w"]}}
"""
    )
    with pytest.raises(TaskBroken, match=rf"service main can't have volume {source} at {target}: .*{why}"):
        async with Started(pool, task):
            pass
    with pytest.raises(TaskBroken, match=r"service web can't have volume \./server/server\.py at /srv: "):
        async with Started(
            pool, make("  main: {build: .}\n  web: {build: server, volumes: ['./server/server.py:/srv']}\n")
        ):
            pass


async def test_missing_volume_folder_is_made(pool, make):
    task = make(
        """
  main: {build: ., volumes: ["./seed:/seed"]}
  web: {build: server, environment: {NAME: web}, volumes: ["./seed/out:/out"]}
""",
        **{"environment/seed/one.txt": "1\n"},
    )
    async with Started(pool, task) as slot:
        await said(slot.group[1], "echo 2 > /out/two")
        assert await said(slot, "cat /seed/one.txt /seed/out/two") == "1\n2"


async def test_lost_service_is_no_verdict(pool, make):
    task = make(f"  main: {{build: .}}\n  web: {{build: server, environment: {{NAME: web}}, {HEALTHY}}}\n")
    async with Started(pool, task) as slot:
        [first] = [
            pid for pid in descendants(os.getpid()) if b"/server.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        parent = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        with pytest.raises(SlotLost, match="of its group ended"):
            while True:
                await said(slot, "sleep 0.05")
    await until_all_free(pool)


async def play(pool, task, agent="nop"):
    run = TaskRun(TaskImages(pool), VerifierLayers(()), task, agent)
    try:
        return (await run.play()).reward
    finally:
        await run.end()


@pytest.mark.parametrize("when", ["before", "itself", "child"])
async def test_service_s_lowered_limit_is_no_zero(pool, make, when):
    task = make(
        f"  main: {{build: .}}\n  db: {{build: server, command: [python3, /hungry.py, {when}], HEALTH}}\n".replace(
            "HEALTH", "healthcheck: {test: 'false', interval: 1s, retries: 99}" if when == "before" else "init: true"
        ),
        **{
            "tests/test.sh": "until cat < /dev/tcp/db/80; do sleep 0.1; done 2> /dev/null; echo 0 > /logs/verifier/reward.txt\n",
        },
    )
    [db] = task.beside
    small = replace(db, limits=LeaseLimits(memory_mib=200))
    lowered = replace(small, lowered={"memory": "services.db.memory_mb: 4096 wanted"})
    limits = LeaseLimits(members=(small.limits,))
    if when != "before":
        assert await play(pool, replace(task, limits=limits, beside=(small,))) == 0, "the task's own limit"
    with pytest.raises(NotSupported, match=r"demo/db: the memory limit was reached.*services.db.memory_mb: 4096"):
        await play(pool, replace(task, limits=limits, beside=(lowered,)))


async def test_services_are_offline_with_the_task(pool, make):
    task = make(
        f"  main: {{build: .}}\n  web: {{build: server, environment: {{NAME: web}}, {HEALTHY}}}\n",
        **{"task.toml": 'version = "1.0"\n[environment]\nnetwork_mode = "no-network"\n'},
    )
    async with Started(pool, task) as slot:
        assert [each.network for each in slot.group] == [False, False]
        assert await said(slot, f"{ASK} http://web") == "web"


async def test_the_agent_alone_may_be_offline(pool, make):
    task = make(
        f"""
  main: {{build: ., networks: [inner]}}
  proxy: {{build: server, environment: {{NAME: proxy}}, networks: [inner, outer], {HEALTHY}}}
  db: {{build: server, environment: {{NAME: db}}, networks: [inner], {HEALTHY}}}
networks: {{inner: {{internal: true}}, outer: {{}}}}
"""
    )
    async with Started(pool, task) as slot:
        assert [each.network for each in slot.group] == [False, True, False]
        assert await said(slot, f"{ASK} http://proxy; {ASK} http://db") == "proxy\ndb"
    async with Started(pool, task, network=False) as slot:
        assert [each.network for each in slot.group] == [False] * 3


@pytest.mark.parametrize(("place", "owner"), [("/traces", "web"), ("/so/deep/traces", "main")])
async def test_a_step_finds_shared_logs_empty(pool, make, place, owner):
    """A volume is the folder of the service in which it is least deep."""
    task = make(
        f"""
  main: {{build: ., volumes: ["traces:/logs/agent", "inner:/tests/a*/b", "./seed:/solution/seed:ro"]}}
  web:
    build: server
    environment: {{NAME: web}}
    volumes: ["traces:{place}", "inner:/inner", "./seed:/seed"]
""",
        **{"environment/seed/one.txt": "1\n"},
    )
    async with Started(pool, task) as slot:
        web = slot.group[1]
        assert (" /logs/agent " in await said(slot, "cat /proc/self/mountinfo")) == (owner == "web")
        for number in ("2", "3"):
            for folder in ("/logs/agent", "/tests", "/tests/a*/b"):
                await said(slot, f"mkdir -p '{folder}/more' && echo {number} > '{folder}/more/own'")
            assert await said(web, f"cat {place}/more/own /inner/more/own") == f"{number}\n{number}"
            await workspace.clear(slot, task)
            assert (await said(slot, "find /logs/agent /tests /solution | sort")).split() == [
                "/logs/agent",
                *("/solution", "/solution/seed", "/solution/seed/one.txt"),
                *("/tests", "/tests/a*", "/tests/a*/b"),
            ]
            assert await said(web, f"ls -A {place} /inner/") == "/inner/:\n\n" * 0 + await said(
                web, f"ls -A {place} /inner/"
            )
    untouched = make("  main: {build: .}\n  web: {build: server, environment: {NAME: web}}\n")
    async with Started(pool, untouched) as slot:
        await said(slot, "mkdir -p /tests/x /solution; ln -s /etc /logs/agent/etc")
        await workspace.clear(slot, untouched)
        assert await said(slot, "ls -d /logs/* /tests /solution 2> /dev/null; ls -d /etc") == "/logs/artifacts\n/etc"


async def test_full_slot_is_no_machine_fault(pool):
    async with pool.lease("full", limits=LeaseLimits(inodes=1000, members=(LeaseLimits(),))) as slot:
        other = await pool.join(slot, ["other"])
        await said(other, "mkdir /data")
        await said(slot, "mkdir /many; for n in $(seq 1200); do : > /many/$n || break; done")
        with pytest.raises(OSError, match="can't be mounted at /new/place") as refused:
            await slot.mount("/data", "/new/place", of=other)
        assert refused.value.errno == errno.ENOSPC
        assert not isinstance(refused.value, SandboxError)


async def test_a_release_meanwhile_leaves_nothing(pool, monkeypatch):
    first = await pool.acquire("first", limits=LeaseLimits(members=(LeaseLimits(),)))
    client = first.link.client
    acquire = client.acquire

    async def late(request):
        lease = await acquire(request)
        first.start_release()
        return lease

    monkeypatch.setattr(client, "acquire", late)
    with pytest.raises(LeaseExpired):
        await pool.join(first, ["db"])
    await until(lambda: pool.stats().leased == 0)
    await until_all_free(pool)


async def test_room_is_kept_before_it_is_taken(pool):
    async with pool.lease("first", limits=LeaseLimits(members=(LeaseLimits(),) * 6)) as first:
        assert pool.stats().free == 1
        joined = await asyncio.gather(*(pool.join(first, [f"s{n}"]) for n in range(6)))
        assert {each.name for each in first.group} == {first.name, *(each.name for each in joined)}
        with pytest.raises(NotSupported, match=r"limits\.members"):
            await pool.join(first, ["more"])
        assert pool.stats().free == 1
        await joined[3].release()
        assert first.lost is not None
    await until_all_free(pool)
