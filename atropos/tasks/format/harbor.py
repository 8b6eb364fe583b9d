"""Task folders in Harbor's layout: task.toml, instruction.md, environment/, tests/ and, optionally, solution/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from atropos.errors import ConfigError
from atropos.tasks.format import machines
from atropos.tasks.format.beside import services_of
from atropos.tasks.format.compose import dockerfile_in, read_compose, read_only_service
from atropos.tasks.format.config import AgentSection, EnvironmentSection, StepSection, TaskConfig
from atropos.tasks.format.files import check_script, read_config, read_instruction
from atropos.tasks.format.recipe import BuildInputs
from atropos.tasks.format.service import MAIN, Service
from atropos.tasks.format.task import VARIABLE, Build, Make, Task, first_recipe


def load_harbor_task(root: Path, variables: Mapping[str, str], builder: Build, images: BuildInputs) -> Task:
    """One folder, checked.

    Args:
        root: the folder.
        variables: what `${NAME}` in its files may stand for.
        builder: the task's.
        images: what is known before any is pulled.

    Raises:
        ConfigError: names the file, the field and the cure.
    """
    config = read_config(root / "task.toml")
    environment = root / "environment"
    own = config.environment
    service = _main_service(root, config)
    config = config.model_copy(update={"environment": machines.with_compose(service, own)})
    context = (service and service.context) or environment
    make = partial(machines.workspace, context, service, config.environment)
    tests, solution = root / "tests", root / "solution"
    recipe, unbuildable = first_recipe(make, images, config.environment)
    task = Task(
        name=root.name,
        path=root,
        instruction=_instruction(root, config),
        config=config,
        context=context,
        recipe=recipe,
        tests=(tests,),
        solution=solution if (solution / "solve.sh").is_file() else None,
        warnings=tuple(f"{name} is not a field of the format; it is ignored" for name in config.unknown()),
        variables=variables,
        unbuildable=unbuildable,
        service=service,
        make=make,
        builder=builder,
    )
    task = replace(task, beside=services_of(task, own, environment, images))
    task = replace(task, verifier=_verifier(task, images, ((config.verifier.environment, tests),)))
    if not config.steps and not _holds_tests(task):
        check_script(tests / "test.sh")
    _check_variables(task)
    return replace(task, steps=tuple(_step(task, images, section) for section in config.steps))


def _main_service(root: Path, config: TaskConfig) -> Service | None:
    """The service that the agent works in, with those beside it, from `environment/`; None: no compose file."""
    environment, image = root / "environment", config.environment.docker_image
    if not environment.is_dir() and image is None:
        raise ConfigError(f"{environment}: is missing; put the workspace's files there (it may be empty)")
    service = read_compose(environment, made=image is not None or (environment / "Dockerfile").is_file())
    _check_services(config, service, root / "task.toml")
    if service is None or not service.beside or image is not None or service.image is not None:
        return service
    if not dockerfile_in(environment, service).is_file():
        raise ConfigError(f"{environment}: services.{service.name}: has neither an image nor a Dockerfile; name one")
    return service


def _instruction(root: Path, config: TaskConfig) -> str:
    """What the agent is told: in one text, where the task has steps."""
    folders = [root / "steps" / section.name for section in config.steps] or [root]
    if (conversation := folders[0] / "trajectory.json").exists():
        raise ConfigError(
            f"{conversation}: no agent is given an earlier conversation; tell it in the instruction, or leave the task "
            "out"
        )
    return "\n\n".join(read_instruction(folder / "instruction.md") for folder in folders)


def _step(task: Task, images: BuildInputs, section: StepSection) -> Task:
    folder = task.path / "steps" / section.name
    tests = tuple(path for path in (task.path / "tests", folder / "tests") if path.is_dir())
    agent = task.config.agent.model_copy(update=section.agent.model_dump(exclude_unset=True))
    solution = folder / "solution"
    step = replace(
        task,
        name=f"{task.name}/{section.name}",
        instruction=read_instruction(folder / "instruction.md"),
        config=task.config.model_copy(update={"agent": agent, "verifier": task.config.verifier.of_step(section)}),
        tests=tests,
        solution=solution if (solution / "solve.sh").is_file() else None if solution.is_dir() else task.solution,
        files=folder / "workdir" if (folder / "workdir").is_dir() else None,
        step=section,
    )
    if step.beside and _is_separate(step) and section is not task.config.steps[-1]:
        raise ConfigError(
            f"{task.path / 'task.toml'}: steps.{section.name}.verifier: a separate verifier between steps needs a "
            "snapshot of the agent's slot, and a slot with services beside it has none; say shared"
        )
    own = None if section.verifier is None else section.verifier.environment
    shared = (task.config.verifier.environment, task.path / "tests")
    step = replace(step, verifier=_verifier(step, images, ((own, folder / "tests"), shared)))
    if not _holds_tests(step):
        scripts = [path / "test.sh" for path in tests if (path / "test.sh").is_file()]
        check_script(scripts[-1] if scripts else folder / "tests" / "test.sh")
    _check_variables(step, f"steps.{section.name}.")
    return step


def _holds_tests(task: Task) -> bool:
    """Whether a separate verifier's own image has the tests in it."""
    return task.verifier is not None and task.verifier.bundled


def _is_separate(task: Task) -> bool:
    verifier = task.config.verifier
    return verifier.environment_mode == "separate" or (
        verifier.environment_mode is None and verifier.environment is not None
    )


def _verifier(task: Task, images: BuildInputs, places: Sequence[tuple[EnvironmentSection | None, Path]]) -> Task | None:
    """The machine of a separate verifier, as Harbor finds it: an image or a Dockerfile of its own, else the task's.

    Args:
        task: the task, or a step.
        images: as `load_harbor_task`.
        places: `[verifier.environment]` and the tests folder, a step's before the task's.
    """
    verifier = task.config.verifier
    if not _is_separate(task):
        return None
    wants = verifier.environment
    for table, folder in places:
        if (table is not None and table.docker_image) or machines.is_machine(folder):
            image = None if table is None else table.docker_image
            config = (wants or task.config.environment).model_copy(update={"docker_image": image, "workdir": None})
            service = read_only_service(folder, "a separate verifier is one slot")
            config = machines.with_compose(service, config)
            if service is not None and service.shm_mib is not None and config.storage_mb is None:
                config = config.model_copy(update={"storage_mb": service.shm_mib})
            make = partial(machines.machine, folder, service, config)
            return _machine_of(task, images, folder, config, make, bundled=True)
    if wants is None:
        return None
    base = task.config.environment
    update = {"docker_image": base.docker_image, "workdir": wants.workdir or base.workdir}
    config = wants.model_copy(update=update)
    make = partial(machines.workspace, task.context, task.service, config)
    return _machine_of(task, images, task.context, config, make, bundled=False)


def _machine_of(
    task: Task, images: BuildInputs, context: Path, wants: EnvironmentSection, make: Make, *, bundled: bool
) -> Task:
    refused = next(wants.refusals("verifier.environment"), None)
    if refused is not None:
        raise ConfigError(f"{task.path / 'task.toml'}: {refused}")
    recipe, unbuildable = first_recipe(make, images, wants)
    return replace(
        task,
        name=f"{task.name}/verifier",
        config=task.config.model_copy(update={"environment": wants, "agent": AgentSection()}),
        context=context,
        recipe=recipe,
        verifier=None,
        service=None,
        beside=(),
        bundled=bundled,
        unbuildable=unbuildable,
        make=make,
    )


def _check_services(config: TaskConfig, service: Service | None, path: Path) -> None:
    """Refuse what is to come from a service that isn't there."""
    known = (MAIN, *(each.name for each in (service.beside if service is not None else ())))
    for field, name in config.services():
        if name not in known:
            raise ConfigError(f"{path}: {field}: {name!r} is no service of the task; it has {', '.join(known)}")


def _check_variables(task: Task, place: str = "") -> None:
    """Refuse a variable that is not given; `place`: what stands before the tables of a step."""
    tables = {
        "environment.env": task.config.environment.env,
        "verifier.env": task.config.verifier.env,
        "solution.env": task.config.solution.env,
        "verifier.environment.env": {} if task.verifier is None else task.verifier.config.environment.env,
    }
    for table, env in tables.items():
        for name, value in env.items():
            for match in VARIABLE.finditer(value):
                if match[2] is None and match[1] not in task.variables:
                    raise ConfigError(
                        f"{task.path / 'task.toml'}: {place}{table}.{name}: ${{{match[1]}}} is not given to tasks; "
                        "list it in task_variables, or write a default"
                    )
