"""Task folders of terminal-bench 1: task.yaml, a Dockerfile or compose file, run-tests.sh and a pytest summary."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atropos.errors import ConfigError
from atropos.tasks.format import dockerfile
from atropos.tasks.format.beside import services_of
from atropos.tasks.format.compose import dockerfile_in, read_compose
from atropos.tasks.format.config import AgentSection, EnvironmentSection, TaskConfig, VerifierSection, explained
from atropos.tasks.format.files import check_script, parse_yaml, read_text
from atropos.tasks.format.recipe import BuildInputs, Recipe, StepSettings
from atropos.tasks.format.service import Service
from atropos.tasks.format.task import Build, Task

_VARIABLES = {"TEST_DIR": "/tests"}


class _TaskYaml(BaseModel):
    """task.yaml. What says nothing about how a task runs is kept as metadata."""

    model_config = ConfigDict(frozen=True, extra="allow")

    instruction: str = Field(min_length=1)
    parser_name: str = "pytest"
    max_agent_timeout_sec: float = Field(default=360, gt=0)
    max_test_timeout_sec: float = Field(default=60, gt=0)
    run_tests_in_same_shell: bool = False


def load_terminal_bench(root: Path, builder: Build, images: BuildInputs) -> Task:
    """One folder, checked. `images`: what is known before any is pulled.

    Raises:
        ConfigError: names the file, the field and the cure.
    """
    facts = _facts(root / "task.yaml")
    if (root / "solution.yaml").is_file() and not (root / "solution.sh").is_file():
        raise ConfigError(f"{root / 'solution.yaml'}: keystrokes can't be honoured; write solution.sh")
    check_script(root / "run-tests.sh")
    service = read_compose(root, made=False)
    context = (service and service.context) or root
    make = partial(_recipe, context, service)
    config = TaskConfig(
        metadata=dict(facts.__pydantic_extra__ or {}),
        agent=AgentSection(timeout_sec=facts.max_agent_timeout_sec),
        verifier=VerifierSection(timeout_sec=facts.max_test_timeout_sec),
        environment=EnvironmentSection(
            network_mode="no-network" if service is not None and service.offline else "public",
            memory_mb=None if service is None else service.memory_mib,
            cpus=None if service is None else service.cpus,
            gpus=None if service is None else service.gpus,
        ),
    )
    tests = (*((root / "tests",) if (root / "tests").is_dir() else ()), root / "run-tests.sh")
    same_shell = "run_tests_in_same_shell: tests get a shell of their own"
    task = Task(
        name=root.name,
        path=root,
        instruction=facts.instruction.strip(),
        config=config,
        context=context,
        recipe=make(images, prebuilt=False),
        tests=tests,
        solution=root / "solution.sh" if (root / "solution.sh").is_file() else None,
        warnings=(same_shell,) if facts.run_tests_in_same_shell else (),
        scoring="pytest",
        test_script="run-tests.sh",
        solution_script="solution.sh",
        service=service,
        make=make,
        builder=builder,
    )
    return replace(task, beside=services_of(task, EnvironmentSection(), root, images))


def _facts(path: Path) -> _TaskYaml:
    text = read_text(path, "say there what the agent is to do")
    try:
        facts = _TaskYaml.model_validate(parse_yaml(text))
    except ValidationError as error:
        raise ConfigError(explained(path, error)) from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not YAML: {error}".replace("\n", " ")) from None
    if facts.parser_name != "pytest":
        raise ConfigError(f"{path}: parser_name: {facts.parser_name!r} can't be honoured; only pytest can")
    return facts


def _recipe(root: Path, service: Service | None, images: BuildInputs, *, prebuilt: bool) -> Recipe:
    del prebuilt  # this layout has no `docker_image`
    if service is not None:
        service.check_platform(root, images.architecture)
    file = dockerfile_in(root, service)
    if file.is_file():
        build = service or Service()
        recipe = dockerfile.parse(file, root, images, build.arguments, build.target)
    elif service is not None and service.image is not None:
        recipe = Recipe(service.image, images.settings.get(service.image, StepSettings("/app")), ())
    else:
        raise ConfigError(f"{file}: is missing; the workspace is made from it")
    recipe = recipe if service is None else service.applied(recipe)
    settings = replace(recipe.settings, env={**recipe.settings.env, **_VARIABLES})
    return replace(recipe, settings=settings)
