"""What a build will do: each step of each stage with its key, from images and files, before anything runs.

A step's key is the SHA-256 of what it starts from, its instruction and what it copies.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

from atropos.tasks.builder.archive import digest_of
from atropos.tasks.format.context import Context
from atropos.tasks.format.recipe import Copy, Download, Folder, Mount, Recipe, Run, Stage, Step
from atropos.wire import ImageInfo

RULES = 6
"""Part of every key: another number when a step's result changes though its instruction doesn't."""
LAST = 1 << 30
"""Number of the last stage."""

StageImages = Mapping[str | None, tuple[ImageInfo, str]]
"""What each FROM means, and the source that a lease names; None: the pool's base, where nothing is named."""


@dataclass(frozen=True)
class PlannedStep:
    """A step with its key, and all that this was made of beside what the step starts from."""

    key: str
    step: Step
    described: Sequence[object]


@dataclass(frozen=True)
class PlannedStage:
    """A stage, from its image and the source that a lease of it names."""

    parent: ImageInfo
    source: str
    steps: tuple[PlannedStep, ...]


Plan = dict[int, PlannedStage]
"""The stages of a build, by their numbers."""


def plan_of(recipe: Recipe, context: Context, images: StageImages, owner: str) -> Plan:
    """The plan of a recipe.

    Args:
        recipe: its steps.
        context: where they copy from.
        images: what its stages start from.
        owner: whose keys they are, which no others are like; empty: everyone's.
    """
    plan: Plan = {}
    last = Stage(LAST, recipe.image or "", recipe.steps or (Folder("/"),))
    for stage in (*recipe.stages, last):  # each copies only from earlier ones
        parent, source = images[stage.image or None]
        # Of the image's id, not its name: what a tag means changes.
        key = key_of(parent.id, owner) if owner else parent.id
        planned: list[PlannedStep] = []
        for step in stage.steps:
            described = describe(step, context, plan)
            key = key_of(RULES, key, described)
            planned.append(PlannedStep(key, step, described))
        plan[stage.index] = PlannedStage(parent, source, tuple(planned))
    return plan


def describe(step: Step, context: Context, plan: Plan) -> list[object]:
    """All that a step's result depends on, beside what it starts from."""
    if isinstance(step, Copy):
        return ["copy", _origin(step, context, plan), _said(step, but={"stage", "files"})]
    if isinstance(step, Run):
        settings = step.settings
        mounts = [
            [_said(mount, but={"content"}), mount.content and describe(mount.content, context, plan)]
            for mount in step.mounts
        ]
        before = [settings.workdir, dict(settings.env), settings.user]
        return ["run", before, mounts, _said(step, but={"settings", "mounts"})]
    return ["folder" if isinstance(step, Folder) else "download", _said(step)]


def _origin(step: Copy, context: Context, plan: Plan) -> str:
    """What identifies the files that a step copies."""
    if step.stage is None:
        return digest_of(context, step)
    stage = plan[step.stage]
    return stage.steps[-1].key if stage.steps else stage.parent.id


def _said(of: Step | Mount, but: Collection[str] = ()) -> dict[str, object]:
    """Its fields, without those that are as they are by default: a new one changes no key of steps that lack it."""
    values = {field.name: getattr(of, field.name) for field in fields(of) if field.name not in but}
    defaults = {field.name: field.default for field in fields(of)}
    return {name: value for name, value in values.items() if value != defaults[name]}


def key_of(*parts: object) -> str:
    """A key that is made of all of these."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()


def text_of(step: Step) -> str:
    """The instruction, in short."""
    if isinstance(step, Run):
        text = f"RUN {shlex.join(step.command)}"
    elif isinstance(step, Folder):
        text = f"WORKDIR {step.path}"
    elif isinstance(step, Download):
        text = f"ADD {step.address} {step.target}"
    else:
        text = f"COPY {' '.join(step.sources)} {step.target}"
    return text if len(text) <= 120 else f"{text[:117]}..."
