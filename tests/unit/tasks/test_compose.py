"""What a compose file says of its services, and what is refused by name."""

from dataclasses import replace

import pytest

from atropos.errors import ConfigError
from atropos.resources import Resources
from atropos.tasks.fit import Room, fit
from atropos.tasks.folder import load_task
from atropos.tasks.format.compose import read_compose
from atropos.tasks.format.compose_values import NOWHERE
from atropos.tasks.format.recipe import BuildInputs, StepSettings
from atropos.tasks.format.service import ServiceVolume
from atropos.tasks.verifier.mode import choose
from atropos.wire import HealthConfig, LeaseLimits
from tests.files import write_files


@pytest.fixture
def folder(tmp_path):
    return write_files(
        tmp_path / "demo",
        {
            "task.toml": 'version = "1.0"\n',
            "instruction.md": "Do it.\n",
            "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
            "environment/db/Dockerfile": 'FROM debian:12\nCMD ["db"]\n',
            "environment/seed/a.sql": "x",
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        },
    )


def services(folder, text):
    (folder / "environment/docker-compose.yaml").write_text(f"services:\n{text}")
    main = read_compose(folder / "environment", made=True)
    return {each.name: each for each in (main, *main.beside)}


def test_services_are_in_start_order(folder):
    found = services(
        folder,
        """
  web: {image: nginx, depends_on: [api]}
  main: {build: ., depends_on: {web: {condition: service_started}, gone: {required: false}}}
  api: {image: api, depends_on: {db: {condition: service_healthy}, job: {condition: service_completed_successfully}}}
  job: {image: api, command: migrate}
  db: {image: postgres, healthcheck: {test: pg_isready}}
  debug: {image: busybox, profiles: [debug]}
""",
    )
    assert [*found] == ["main", "job", "db", "api", "web"]
    assert found["api"].depends_on == {"db": "service_healthy", "job": "service_completed_successfully"}
    assert found["main"].depends_on == {"web": "service_started"}


@pytest.mark.parametrize(
    ("check", "meant"),
    [
        (
            "{test: ['CMD', 'pg isready', -U, ''], interval: 5s, retries: 5}",
            HealthConfig(test=("CMD", "pg isready", "-U", ""), interval_s=5, retries=5),
        ),
        (
            "{test: ['CMD-SHELL', 'a || exit $$?'], timeout: 1m30s, start_period: 500ms}",
            HealthConfig(test=("CMD-SHELL", "a || exit $?"), timeout_s=90, start_period_s=0.5),
        ),
        (
            "{test: curl localhost, start_interval: 1.5s, interval: 1h, retries: '3'}",
            HealthConfig(test=("CMD-SHELL", "curl localhost"), start_interval_s=1.5, interval_s=3600, retries=3),
        ),
        ("{interval: 5s}", HealthConfig(interval_s=5)),
        ("{test: [NONE]}", HealthConfig(test=("NONE",))),
        ("{disable: true, test: x}", HealthConfig(test=("NONE",))),
        ("{}", None),
    ],
)
def test_health_checks_are_docker_s(folder, check, meant):
    found = services(folder, f"  main: {{build: .}}\n  db: {{image: db, healthcheck: {check}}}")
    assert found["db"].healthcheck == meant


@pytest.mark.parametrize(
    ("said", "image", "meant"),
    [
        ("", ("CMD", "own"), ("CMD", "own", 7)),
        ("healthcheck: {interval: 9s}", ("CMD", "own"), ("CMD", "own", 9)),
        ("healthcheck: {test: [CMD, other]}", ("CMD", "own"), ("CMD", "other", 7)),
        ("healthcheck: {disable: true}", ("CMD", "own"), None),
        ("healthcheck: {interval: 9s}", ("NONE",), None),
        ("", None, None),
        ("healthcheck: {test: [CMD, other], interval: 1s}", None, ("CMD", "other", 1)),
    ],
)
def test_an_image_s_check_comes_last(folder, said, image, meant):
    services(folder, f"  main: {{build: .}}\n  db: {{image: db, command: x, {said}}}")
    check = image and HealthConfig(test=image, interval_s=7)
    [db] = load_task(folder).beside
    found = db.on(BuildInputs({"db": StepSettings(healthcheck=check)}), prebuilt=True).recipe.settings.healthcheck
    assert (found and (*found.test, found.interval_s)) == meant


def test_builds_have_args_and_targets(folder):
    (folder / "environment/db/Dockerfile").write_text(
        "ARG BASE=debian:12\nFROM ${BASE} AS one\nARG A=own\nARG B\nARG C=own\nENV SEEN=$A,$B,$C,$D\nFROM ${BASE} AS two\n"
        'CMD ["two"]\n'
    )
    for args in ("{BASE: alpine, A: 1, B: '${X:-two}', D: no}", "[BASE=alpine, A=1, B=two, D=no]"):
        services(folder, f"  main: {{build: .}}\n  db: {{build: {{context: db, args: {args}, target: ONE}}}}")
        [db] = load_task(folder).beside
        assert (db.recipe.image, db.recipe.settings.env) == ("alpine", {"SEEN": "1,two,own,"})
    services(folder, "  main: {build: .}\n  db: {build: {context: db, target: '1'}}")
    [db] = load_task(folder).beside
    assert (db.recipe.image, db.recipe.settings.cmd) == ("debian:12", ("two",))


def test_other_hosts_have_addresses(folder):
    found = services(
        folder,
        """
  main: {build: ., extra_hosts: ["a.example:10.1.2.3", "b=::1", "b=127.0.0.1,127.0.0.2", "c:[fe80::1]"], environment: {no_proxy: own}}
  db: {image: db, container_name: my-db, extra_hosts: {up: host-gateway, two: [1.1.1.1, 1.0.0.1]}}
  web: {image: web}
""",
    )
    assert found["main"].extra_hosts == {
        "a.example": ("10.1.2.3",),
        "b": ("::1", "127.0.0.1", "127.0.0.2"),
        "c": ("fe80::1",),
    }
    assert found["db"].extra_hosts == {"up": (NOWHERE,), "two": ("1.1.1.1", "1.0.0.1")}
    assert found["main"].env["no_proxy"] == "own"
    assert found["main"].env["NO_PROXY"] == "localhost,127.0.0.1,::1,main,db,my-db,web,a.example,b,c"
    assert found["web"].env == {}


def test_volumes_are_named_or_the_task_s(folder):
    found = services(
        folder,
        """
  main: {build: ., volumes: ["data:/data:ro", "./seed:/seed", "/anonymous", "${HOST_LOGS}:/logs/agent"]}
  db:
    image: db
    volumes:
      - {type: volume, source: data, target: /var/lib, volume: {nocopy: true}}
      - {type: bind, source: ./seed/a.sql, target: /init.sql, read_only: true}
      - {type: tmpfs, target: /tmp}
""",
    )
    seed = (folder / "environment/seed").resolve()
    assert found["main"].volumes == (
        ServiceVolume("data", "/data", None, read_only=True),
        ServiceVolume("./seed", "/seed", seed),
    )
    assert found["db"].volumes == (
        ServiceVolume("data", "/var/lib"),
        ServiceVolume("./seed/a.sql", "/init.sql", seed / "a.sql", read_only=True),
    )


def test_logs_are_where_every_slot_has_them(folder):
    for volume, there in {
        "shared:/app/logs": "/app/logs",
        "./logs:/data": "/data",
        "{type: volume, source: logs, target: /var/logs}": "/var/logs",
        "${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}": None,
        "./mine:/logs/agent:rw": None,
        "{type: bind, source: ./mine, target: /logs}": None,
        "/logs/agent": None,
        "APP_LOGS:/logger": "/logger",
        "../out:/logs/agent": None,
        "/tmp/out:/logs/verifier": None,
        "${HOST_OUT}:/logs/agent": None,
        "${HOST_OUT:-/tmp/o}:/logs": None,
        "{type: bind, source: /var/log/x, target: /logs}": None,
        "logs:/logs/agent:rshared": None,
        "./logs:${LOGGED:-/logs}/own": None,
        "logs:${PLACE:-/app}": "/app",
    }.items():
        said = volume if volume.startswith("{") else f'"{volume}"'
        found = services(folder, f"  main: {{build: ., volumes: [{said}]}}\n  db: {{image: db}}\n")["main"].volumes
        assert [each.target for each in found] == ([there] if there else []), volume


def test_logs_that_services_share_are_theirs(folder):
    found = services(
        folder,
        """
  main: {build: ., volumes: ["traces:/logs/agent/", "own:/logs/own", "./mine:/logs/mine"]}
  web: {image: web, volumes: ["traces:/logs", "./mine:/mine", "other:/logs/other"]}
""",
    )
    assert [(each.name, each.target) for each in found["main"].volumes] == [
        ("traces", "/logs/agent"),
        ("./mine", "/logs/mine"),
    ]
    assert [(each.name, each.target) for each in found["web"].volumes] == [("traces", "/logs"), ("./mine", "/mine")]
    for target in ("/logs", "/logs/verifier"):
        with pytest.raises(ConfigError, match=rf"main.volumes: all:{target}: .* see the verifier's folder"):
            services(
                folder, f'  main: {{build: ., volumes: ["all:{target}"]}}\n  web: {{image: web, volumes: ["all:/v"]}}\n'
            )


def test_volume_and_path_of_one_name(folder):
    text = "  main: {build: ., volumes: ['seed:/logs/agent']}\n  db: {image: db, volumes: ['./seed:/logs/seed']}\n"
    assert [each.volumes for each in services(folder, text).values()] == [(), ()]
    text = "  main: {build: ., volumes: ['./seed/:/logs/seed']}\n  db: {image: db, volumes: [{type: bind, source: seed, target: /x}]}\n"
    assert [[each.target for each in one.volumes] for one in services(folder, text).values()] == [
        ["/logs/seed"],
        ["/x"],
    ]


def test_names_and_restarts(folder):
    found = services(
        folder,
        """
  main: {build: ., networks: [inner], cap_add: [SYS_PTRACE, cap_chown], mem_reservation: 1g}
  db: {image: db, container_name: my-db, networks: {inner: {aliases: [database]}}, restart: "on-failure:3"}
  web: {image: web, restart: unless-stopped, networks: [inner, outer]}
""",
    )
    assert found["db"].names == ("db", "my-db", "database")
    assert [each.restart for each in found.values()] == ["no", "on-failure", "always"]


def test_variables_of_files_are_compose_s(folder):
    (folder / "environment/a.env").write_text(
        """# of a
PLAIN = some words  # a remark
export EXPORTED=1
HASH=a#b
SINGLE='$as it is \\n' # a remark
DOUBLE="a \\"b\\" \\n${UNSET:-c}"
EMPTY=
MY-VAR[0]=1
BOTH=a
"""
    )
    (folder / "environment/b.env").write_text("BOTH=b\nSAID=b\n")
    text = """
  main: {build: ., env_file: [./a.env, {path: b.env}, {path: c.env, required: false}], environment: {SAID: said}}
  db: {image: db, env_file: b.env}
"""
    found = services(folder, text)
    assert found["main"].env == {
        "PLAIN": "some words",
        "EXPORTED": "1",
        "HASH": "a#b",
        "SINGLE": "$as it is \\n",
        "DOUBLE": 'a "b" \nc',
        "EMPTY": "",
        "MY-VAR[0]": "1",
        "BOTH": "b",
        "SAID": "said",
    }
    assert found["db"].env == {"BOTH": "b", "SAID": "b"}
    for line, why in {
        "NAME": "'NAME' is no line like NAME=VALUE",
        'A="open': "is no line like",
        "A=$HOME": r"\$HOME is not given to tasks",
    }.items():
        (folder / "environment/b.env").write_text(f"# first\n{line}\n")
        with pytest.raises(ConfigError, match=rf"b\.env:2: .*{why}"):
            services(folder, text)


def test_temporary_folders_are_empty_ones(folder):
    text = """
  main: {build: ., tmpfs: /run}
  db:
    image: db
    tmpfs: [/tmp, "/cache:size=64m,mode=700,noexec"]
    volumes: [{type: tmpfs, target: /work}, {type: tmpfs, target: /mine, tmpfs: {mode: 0o755, size: 1m}}]
"""
    found = services(folder, text)
    assert found["main"].tmpfs == {"/run": "1777"}
    assert found["db"].tmpfs == {"/tmp": "1777", "/cache": "700", "/work": "1777", "/mine": "755"}
    assert choose(load_task(folder)).mode == "shared"


def test_places_that_a_harness_names(folder):
    found = services(folder, "  main: {build: ., environment: ['TEST_DIR=${TEST_DIR}', 'LOGS=$ENV_AGENT_LOGS_PATH/x']}")
    assert found["main"].env == {"TEST_DIR": "/tests", "LOGS": "/logs/agent/x"}


def test_networks_that_lead_nowhere(folder):
    text = """
  main: {build: ., networks: [inner, outer]}
  db: {image: db, networks: [inner]}
networks: {inner: {internal: true}, outer: {}}
"""
    assert {name: each.offline for name, each in services(folder, text).items()} == {"main": False, "db": True}
    task = load_task(folder)
    assert [each.offline for each in (task, *task.beside)] == [False, True]


@pytest.mark.parametrize(("mode", "beside"), [("public", [False, True]), ("no-network", [True, True])])
def test_services_reach_more(folder, mode, beside):
    (folder / "task.toml").write_text(f'version = "1.0"\n[environment]\nnetwork_mode = "{mode}"\n')
    services(
        folder,
        """
  main: {build: ., networks: [inner]}
  proxy: {image: proxy, networks: [inner, outer]}
  db: {image: db, networks: [inner]}
networks: {inner: {internal: true}, outer: {}}
""",
    )
    task = load_task(folder)
    assert [each.offline for each in (task, *task.beside)] == [True, *beside]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "  main: {}\n  db: {image: db, depends_on: [main]}\n  x: {image: x, depends_on: [y]}",
            "x wait for each other",
        ),
        ("  main: {depends_on: [db]}\n  db: {image: db, depends_on: [main]}", "main, db wait for each other"),
        (
            "  main: {depends_on: {db: {condition: service_healthy}}}\n  db: {image: db, healthcheck: {disable: true}}",
            r"services\.main\.depends_on\.db: its healthcheck is disabled",
        ),
        ("  main: {depends_on: {db: {condition: ready}}}\n  db: {image: db}", r"db\.condition: 'ready' is none"),
        ("  main: {}\n  db: {image: db, network_mode: 'service:main'}", r"services\.db\.network_mode: 'service:main'"),
        ("  main: {}\n  db: {image: db, cap_add: [NET_ADMIN]}", r"services\.db\.cap_add\.NET_ADMIN: can't be honoured"),
        ("  main: {}\n  db: {image: db, deploy: {replicas: 2}}", r"services\.db\.deploy\.replicas"),
        ("  main: {}\n  db: {build: {context: db, args: [A]}}", r"db\.build\.args\.A: takes the value of this machine"),
        ("  main: {}\n  db: {build: {context: db, target: none}}", r"db/Dockerfile: has no stage 'none'"),
        ("  main: {}\n  db: {build: {context: db, secrets: [a]}}", r"services\.db\.build\.secrets: can't"),
        ("  main: {}\n  db: {image: db, volumes: ['/etc:/x']}", "is outside of .*environment"),
        ("  main: {}\n  db: {image: db, volumes: ['../tests:/x']}", "is outside of .*environment"),
        ("  main: {}\n  db: {image: db, volumes: ['data:x']}", "write SOURCE:/TARGET"),
        ("  main: {}\n  db: {image: db, volumes: ['data:/']}", "write SOURCE:/TARGET"),
        ("  main: {}\n  db: {image: db, volumes: ['data:/x:shared']}", "option 'shared' can't be honoured"),
        (
            "  main: {}\n  db: {image: db, healthcheck: {test: [CMD]}}",
            r"healthcheck\.test: \['CMD'\]: write CMD and words",
        ),
        ("  main: {}\n  db: {image: db, healthcheck: {test: 5}}", r"healthcheck\.test: 5: write CMD and words"),
        ("  main: {}\n  db: {image: db, healthcheck: {test: x, retries: -1}}", r"retries: '-1' is no number"),
        ("  main: {}\n  db: {image: db, healthcheck: {test: x, timeout: -1}}", r"timeout: -1 is no time"),
        ("  main: {}\n  db: {image: db, healthcheck: {test: x, interval: soon}}", "interval: 'soon' is no time"),
        ("  main: {}\n  db: {image: db, restart: often}", r"restart: 'often' is none"),
        ("  main: {}\n  db: {image: db, env_file: /etc/environment}", r"env_file: is outside of .*environment"),
        ("  main: {}\n  db: {image: db, env_file: none.env}", r"none\.env: .*"),
        ("  main: {}\n  db: {image: db, env_file: {path: a, format: raw}}", r"env_file"),
        ("  main: {}\n  db: {image: db, tmpfs: '/x:uid=5'}", r"tmpfs: /x:uid=5: option 'uid' can't be honoured"),
        ("  main: {}\n  db: {image: db, tmpfs: x}", r"tmpfs: x, mode 1777: write a whole path"),
        (
            "  main: {}\n  db: {image: db, networks: {default: {ipv4_address: 10.0.0.2}}}",
            r"default\.ipv4_address: can't",
        ),
        ("  main: {}\n  db: {image: db, extra_hosts: ['a:10.0.0']}", r"db\.extra_hosts\.a: '10\.0\.0' is no address"),
        ("  main: {}\n  db: {image: db, extra_hosts: ['a']}", r"services\.db\.extra_hosts\.a: '' is no address"),
        ("  main: {}\n  db: {image: db, extra_hosts: {'a b': 10.0.0.2}}", "'a b' can't be the name of a host"),
        ("  main: {}\ninclude: [more.yaml]", "include: other files aren't read"),
        ("  main: {}\n  db: {build: ../db}", r"services\.db\.build\.context: \.\./db is outside"),
        ("  main: {}\n  db: {command: x, build: nowhere}", r"services\.db: has neither an image nor a Dockerfile"),
        ("  main: {}\n  db: {image: db, container_name: 'a b'}", r"services\.db: 'a b' can't be the name of a host"),
    ],
)
def test_what_no_slot_has_is_refused(folder, text, named):
    (folder / "environment/docker-compose.yaml").write_text(f"services:\n{text}")
    with pytest.raises(ConfigError, match=named) as refused:
        load_task(folder)
    assert "\n" not in str(refused.value)


def test_agent_may_have_the_dockerfile(folder):
    (folder / "environment/docker-compose.yaml").write_text("services: {db: {build: db}, web: {image: nginx}}")
    task = load_task(folder)
    assert (task.recipe.workdir, [each.name for each in task.beside]) == ("/app", ["demo/db", "demo/web"])
    assert (task.beside[0].recipe.settings.cmd, task.beside[1].image) == (("db",), "nginx")
    assert choose(task).mode == choose(task, "view").mode == "shared"
    (folder / "environment/Dockerfile").unlink()
    with pytest.raises(ConfigError, match=r"services\.main: has neither an image nor a Dockerfile"):
        load_task(folder)


def test_a_dockerfile_precedes_an_image(folder):
    (folder / "environment/docker-compose.yaml").write_text("services: {main: {image: 'mine:latest'}, db: {image: db}}")
    task = load_task(folder)
    assert (task.config.environment.docker_image, task.recipe.workdir, task.beside[0].image) == (None, "/app", "db")
    (folder / "environment/Dockerfile").unlink()
    assert load_task(folder).image == "mine:latest"


@pytest.mark.parametrize("own", ["Dockerfile", "image"])
def test_one_service_may_be_beside(folder, own):
    if own == "image":
        (folder / "environment/Dockerfile").unlink()
        (folder / "task.toml").write_text('version = "1.0"\n[environment]\ndocker_image = "mine"\n')
    for said, beside in {
        "db: {image: db}": ["demo/db"],
        "db: {build: db}": ["demo/db"],
        "client: {command: x}": [],
    }.items():
        (folder / "environment/docker-compose.yaml").write_text(f"services: {{{said}}}")
        task = load_task(folder)
        assert ([each.name for each in task.beside], task.config.environment.docker_image) == (
            beside,
            "mine" if own == "image" else None,
        )
    if own == "Dockerfile":
        (folder / "environment/docker-compose.yaml").write_text("services: {app: {build: ., environment: {A: b}}}")
        task = load_task(folder)
        assert (task.beside, task.recipe.settings.env) == ((), {"A": "b"}), "it is the agent's"


def test_a_lease_keeps_room_for_the_services(folder):
    (folder / "environment/docker-compose.yaml").write_text(
        "services: {main: {build: .}, db: {build: db, mem_limit: 3g, cpus: 2}, web: {image: nginx}}"
    )
    task, slot = load_task(folder), Resources(memory_mib=1024, disk_mib=512)
    found = fit(task, Room(slot, most_mib=8192), images=())
    assert found.limits == LeaseLimits(members=(LeaseLimits(memory_mib=3072, cpu_quota=2), LeaseLimits()))
    assert [each.limits for each in found.sized(task).beside] == [*found.limits.members]
    [refused] = fit(task, Room(slot, most_mib=4096), images=()).refused
    assert refused.startswith("services: 3 slots take 5120 MiB of memory together, a container has 4096; raise")


def test_service_has_room_for_its_share(folder):
    (folder / "environment/docker-compose.yaml").write_text(
        "services: {main: {build: .}, db: {build: db, shm_size: 1gb}, web: {image: nginx, shm_size: 128m}}"
    )
    found = fit(load_task(folder), Room(Resources(memory_mib=768, disk_mib=512), most_mib=8192), images=())
    assert found.limits == LeaseLimits(members=(LeaseLimits(memory_mib=1024, disk_mib=1024), LeaseLimits()))


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        ("mem_limit: 1g, shm_size: 64m", None),
        ("mem_limit: 4g, shm_size: 1g", LeaseLimits(memory_mib=4096, disk_mib=1024)),
        ("mem_limit: 1g, shm_size: 2g", LeaseLimits(memory_mib=2048, disk_mib=2048)),
        ("shm_size: 6g", LeaseLimits(disk_mib=6144)),
    ],
)
def test_shared_room_is_part_of_memory(folder, said, limits):
    services(folder, f"  main: {{build: ., {said}}}")
    task, room = load_task(folder), Room(Resources(memory_mib=1024, disk_mib=512), most_mib=4096)
    found = fit(task, room)
    assert (found.limits, found.refused) == (limits, ())
    for volume in ("memory", "disk"):
        refused = fit(task, replace(room, volume=volume)).refused
        assert all(each.startswith("services.main.shm_size: ") for each in refused), refused
        assert bool(refused) == (limits is not None and (volume == "disk" or limits.disk_mib > 4096))


def test_words_are_as_compose_reads_them(folder):
    """As compose-go has it, whose YAML is 1.2 but for typed fields, and which prints numbers as Go does."""
    (folder / "environment/Dockerfile").write_text("FROM debian:13\n")
    (folder / "environment/docker-compose.yaml").write_text(
        "services:\n  main:\n    privileged: false\n    security_opt: []\n    read_only: false\n"
        "    environment: {A: yes, B: on, C: true, D: 2020-01-01, E: 1.0, F: 3.14, G: 007, H: no}\n"
        "    volumes: [{type: bind, source: ./d, target: /d, read_only: yes}]\n"
        "  db:\n    image: db\n    restart: no\n    healthcheck: {disable: no, test: 'true'}\n    networks: [closed]\n"
        "networks: {closed: {internal: yes}}\n"
    )
    service = load_task(folder).service
    assert " ".join(service.env.values()) == "yes on true 2020-01-01 1 3.14 7 no"
    assert service.volumes[0].read_only
    [db] = service.beside
    assert (db.restart, db.offline, db.healthcheck.test) == ("no", True, ("CMD-SHELL", "true"))


def test_files_of_other_names_are_not_read(folder):
    """As in Harbor, which builds the Dockerfile beside them, and copies them like any other file."""
    (folder / "environment/Dockerfile").write_text("FROM debian:13\nCOPY . /all/\n")
    (folder / "environment/docker-compose.yml").write_text("services: {web: {build: ./web}, db: {image: db}}")
    task = load_task(folder)
    assert task.service is None
    assert not task.beside


def test_compose_sizes_are_no_defaults(folder):
    services(folder, "  main: {build: ., mem_limit: 2g}\n  db: {image: db, mem_limit: 2g}")
    room = Room(Resources(memory_mib=1024, disk_mib=512), most_mib=1024)
    refused = [each.partition(",")[0] for each in fit(load_task(folder), room, images=()).refused[:2]]
    assert refused == ["environment.memory_mb: 2048 wanted", "services.db.memory_mb: 2048 wanted"]


def test_what_is_lowered_is_of_one_machine(folder):
    (folder / "environment/docker-compose.yaml").write_text(
        "services: {main: {build: .}, db: {build: db, mem_limit: 9g}, web: {image: nginx}}"
    )
    task = load_task(folder)
    found = fit(task, Room(Resources(memory_mib=1024, disk_mib=512), most_mib=4096), images=(), policy="clamp").sized(
        task
    )
    assert [[*each.lowered] for each in (found, *found.beside)] == [[], ["memory"], []]


def reserved(request):
    """A service's key that reserves devices."""
    return f"deploy: {{resources: {{reservations: {{devices: [{request}]}}}}}}"


@pytest.mark.parametrize(
    ("said", "gpus"),
    [
        ("gpus: [{count: 2}]", 2),
        (reserved("{driver: nvidia, count: 1, capabilities: [gpu, utility]}"), 1),
        (reserved("{driver: cdi, device_ids: [nvidia.com/gpu=0, nvidia.com/gpu=3], capabilities: [gpu]}"), 2),
        ("deploy: {resources: {reservations: {memory: 1g}}}", 0),
    ],
)
def test_gpus_are_asked_for(folder, said, gpus):
    services(folder, f"  main: {{build: ., {said}}}")
    for toml, wanted in (("", gpus), ("[environment]\ngpus = 0\n", gpus), ("[environment]\ngpus = 3\n", 3)):
        (folder / "task.toml").write_text(f'version = "1.0"\n{toml}')
        task, room = load_task(folder), Room(Resources(memory_mib=1024, disk_mib=512))
        assert task.config.environment.wanted_gpus == wanted
        assert [each.split(":")[0] for each in fit(task, room).refused] == ["environment.gpus"] * bool(wanted)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("main: {build: ., gpus: all}", r"services\.main\.gpus: all: .*; write how many in count"),
        (f"main: {{build: ., {reserved('{capabilities: [gpu]}')}}}", r"reservations\.devices: all: .* in count"),
        (f"main: {{build: ., {reserved('{capabilities: [tpu], count: 1}')}}}", "tpu can't be honoured in a slot"),
        ("main: {build: .}\n  db: {image: db, gpus: [{count: 1}]}", r"services\.db: services beside .* no GPUs"),
    ],
)
def test_other_devices_are_refused(folder, said, why):
    with pytest.raises(ConfigError, match=why):
        services(folder, f"  {said}")


@pytest.mark.parametrize("where", ["{build: ., platform: %s}", "{build: {context: ., platforms: [%s]}}"])
def test_a_platform_is_what_slots_are(folder, where):
    for platform in ("linux/amd64", "linux/arm64", "linux/riscv64"):
        services(folder, f"  main: {where % platform}\n  db: {{image: db}}")
        for architecture in ("amd64", "arm64"):
            if platform.endswith(architecture):
                assert load_task(folder, architecture=architecture).service.platforms == (platform,)
                continue
            why = f"services.main.platform: {platform}: slots are linux/{architecture}"
            with pytest.raises(ConfigError, match=why):
                load_task(folder, architecture=architecture)
    services(folder, "  main: {build: {context: ., platforms: [linux/amd64, linux/arm64]}}\n  db: {image: db}")
    assert all(load_task(folder, architecture=each) for each in ("amd64", "arm64"))
    services(folder, "  main: {build: .}\n  db: {image: db, platform: linux/riscv64}")
    with pytest.raises(ConfigError, match=r"services\.db\.platform: linux/riscv64: slots are"):
        load_task(folder)


def test_a_separate_verifier_is_one_slot(folder):
    (folder / "tests/docker-compose.yaml").write_text("services: {main: {image: a}, db: {image: b}}")
    (folder / "task.toml").write_text('version = "1.0"\n[verifier]\nenvironment_mode = "separate"\n')
    with pytest.raises(ConfigError, match=r"several services \(main, db\) can't be honoured: a separate verifier"):
        load_task(folder)
    for field in ("volumes: ['data:/data']", "healthcheck: {test: x}", "extra_hosts: ['a:1.1.1.1']"):
        (folder / "tests/docker-compose.yaml").write_text(f"services: {{main: {{image: a, {field}}}}}")
        with pytest.raises(ConfigError, match=rf"services\.main\.{field.partition(':')[0]}: can't be honoured"):
            load_task(folder)


def test_steps_beside_services_share(folder):
    (folder / "environment/docker-compose.yaml").write_text("services: {main: {build: .}, db: {image: db}}")
    for name in ("one", "two"):
        (folder / f"steps/{name}/tests").mkdir(parents=True)
        (folder / f"steps/{name}/instruction.md").write_text("Go on.\n")
    toml = 'version = "1.0"\n[[steps]]\nname = "one"\nverifier.environment_mode = "%s"\n[[steps]]\nname = "two"\n'
    (folder / "task.toml").write_text(toml % "separate")
    with pytest.raises(ConfigError, match=r"steps\.one\.verifier: a separate verifier between steps needs a snapshot"):
        load_task(folder)
    (folder / "task.toml").write_text(toml % "shared")
    assert [len(step.beside) for step in load_task(folder).steps] == [1, 1]
