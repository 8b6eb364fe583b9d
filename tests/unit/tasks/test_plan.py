"""A build's keys: what changes a step's result changes its key, and nothing else does."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from atropos.tasks.builder.plan import LAST, plan_of, text_of
from atropos.tasks.format.context import Context
from atropos.tasks.format.recipe import Copy, Download, Folder, Mount, Recipe, Run, Stage, StepSettings
from atropos.wire import ImageInfo

BASE = ImageInfo(id="0" * 64, source="docker://base", bytes=1)
OTHER = ImageInfo(id="1" * 64, source="docker://other", bytes=1)
STEPS = [
    Folder("/srv"),
    Copy(("a",), "/srv/"),
    Run(("make",)),
    Download("https://host.example/a", "/srv/"),
    Mount("/c"),
]
VALUES = {
    "path": "/else",
    "owner": (1, 1),
    "sources": ("b",),
    "target": "/else",
    "mode": 0o700,
    "keep_folder_name": True,
    "stage": 1,
    "files": (("a", "text"),),
    "exclude": ("*.pyc",),
    "unpack": True,
    "parents": True,
    "command": ("make", "all"),
    "settings": StepSettings(user="1"),
    "mounts": (Mount("/cache"),),
    "offline": True,
    "address": "https://host.example/b",
    "checksum": "2" * 64,
    "content": Copy(("b",), "/cache"),
    "cache": "name",
}


STAGES = (Stage(0, "", (Folder("/x"),)), Stage(1, "", ()))


@pytest.fixture
def context(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name)
    return Context(tmp_path)


def planned(steps, context, *, base=BASE, owner=""):
    images = {"base": (base, base.source), None: (OTHER, OTHER.source)}
    return plan_of(Recipe("base", StepSettings(), tuple(steps), STAGES), context, images, owner)


def keys(steps, context, **options):
    return [step.key for step in planned(steps, context, **options)[LAST].steps]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_each_field_is_in_the_key(step, context):
    def key(each):
        return keys([Run(("make",), mounts=(each,)) if isinstance(each, Mount) else each], context)

    for field in fields(step):
        assert key(replace(step, **{field.name: VALUES[field.name]})) != key(step), field.name


def test_settings_in_a_runs_key(context):
    def key(**settings):
        return keys([Run(("make",), StepSettings(**settings))], context)

    assert len({*map(str, (key(), key(workdir="/w"), key(env={"A": "b"}), key(user="1")))}) == 4
    assert key(cmd=("sleep", "1"), volumes=("/v",)) == key()


def test_a_key_holds_all_before_it(context, tmp_path):
    first = keys(STEPS[:4], context)
    assert len({*first}) == 4
    assert keys(STEPS[:2], context) == first[:2]
    for other in (keys(STEPS[:4], context, base=OTHER), keys(STEPS[:4], context, owner="alice")):
        assert not {*first} & {*other}
    (tmp_path / "a").write_text("changed")
    changed = keys(STEPS[:4], context)
    assert [one == another for one, another in zip(first, changed, strict=True)] == [True, False, False, False]


def test_nothing_to_do_makes_the_root(context):
    plan = planned([], context)
    assert [step.step for step in plan[LAST].steps] == [Folder("/")]
    assert (plan[1].parent, plan[1].source, plan[1].steps) == (OTHER, OTHER.source, ())


def test_instructions_in_short():
    texts = [text_of(step) for step in STEPS[:4]]
    assert texts == ["WORKDIR /srv", "COPY a /srv/", "RUN make", "ADD https://host.example/a /srv/"]
    assert text_of(Folder("/" + 200 * "x")) == "WORKDIR /" + 108 * "x" + "..."
    assert text_of(Folder("/" + 111 * "x")) == "WORKDIR /" + 111 * "x"
