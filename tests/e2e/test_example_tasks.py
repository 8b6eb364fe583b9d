"""The verifiers of the example tasks: wrong answers to each, which its solution with one mistake gives, score 0.

ATROPOS_FAULTS above 1 tries all five mistakes of each, not the second and fourth.
"""

import asyncio
import os
import shutil

import pytest

from atropos.tasks.attempt import TaskRun
from atropos.tasks.fit import Room, fit
from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages
from atropos.tasks.verifier.layers import VerifierLayers
from tests.e2e.test_tasks import EXAMPLES, no_server_is_awaited, pool
from tests.repeats import TIMES

__all__ = ["no_server_is_awaited", "pool"]
MISTAKES = {
    "access-log-report": {
        'target.split("?")[0]': "target",
        '0 if length == "-" else': '1 if length == "-" else',
        'if code[0] == "5"': 'if code[0] in "45"',
        "bad += 1": "bad += 0",
        "(-item[1], item[0])": "item[0]",
    },
    "bisect-regression": {
        "refs/bisect/bad": "refs/bisect/bad~1",
        "> /workspace/culprit.txt": "> /workspace/culprit; : > /workspace/culprit.txt",
        "git commit -q -am": "true git commit -q -am",
        "git commit -q": "git commit -q --amend",
        "left = -number(words)": "left = number(words)",
    },
    "build-c-program": {
        "(values[count / 2 - 1] + values[count / 2]) / 2": "values[count / 2]",
        "squares / (double)count": "squares / (double)(count + 1)",
        "rm -f stats": "rm -f",
        "bad input: %s": "bad word: %s",
        "mean %.3f": "mean %.2f",
    },
    "clean-customers": {
        ".lower()": "",
        '>= old["signup"]': '<= old["signup"]',
        '("+" if row["phone"].startswith("+") else "")': '""',
        "in sorted(kept)": "in kept",
        '" ".join(row["name"].split())': 'row["name"]',
    },
    "decode-records": {
        "signed=True) / 100": "signed=True) / 10",
        "sum(record[:-1]) % 256 != record[-1]": "False",
        "signed=True": "signed=False",
        "byte >> bit & 1": "byte >> (7 - bit) & 1",
        "sys.exit(1)": "sys.exit(2)",
    },
    "fix-c-overflow": {
        "count == 255": "count == 254",
        "count == 0 || (byte": "(byte",
        "return 1;": "return 0;",
        "rle: bad input": "bad input",
        "int byte, last = EOF, count = 0": "int last = EOF, count = 0; signed char byte",
    },
    "fix-ledger": {
        "if source == target:": "if False:",
        "if value != int(value):": "if False:",
        "if not overdraft and": "if overdraft and",
        "if name == account": "if name.startswith(account)",
        "sorted({name for name, _ in self.entries})": "[name for name, _ in self.entries]",
    },
    "fix-permissions": {
        "-type d -exec chmod 750": "-type d -exec chmod 755",
        "'*.sh'": "'job.sh'",
        "chmod -R go= share/private": "true",
        "'#!'": "'#?'",
        "chmod 640": "chmod 644",
    },
    "git-lost-commit": {
        'cherry-pick "$lost"': 'cherry-pick -n "$lost"',
        'git cherry-pick "$lost"': 'git reset -q --hard "$lost"',
        'git cherry-pick "$lost"\n': 'git checkout -q "$lost"\n',
        'pick "$lost"': 'pick "$lost"; git commit -q --amend --reset-author --no-edit',
        "git cherry-pick": "git merge -q -m 'Add rate limiter'",
    },
    "git-purge-secret": {
        "| git update-ref --stdin": "| cat",
        "git gc -q --prune=now": "true",
        "API_KEY=REMOVED/": "API_KEY=GONE/",
        "cat -- --all": "cat -- main",
        "[ -f config.env ]": "[ -f other.env ]",
    },
    "incremental-make": {
        "-MMD -MP": "",
        "$(wildcard src/*.c)": "src/answer.c src/extra.c src/greet.c src/main.c",
        "rm -rf build": "rm -f build/*.o",
        "$(CC) $(CFLAGS) -o $@ $^": "cc $(CFLAGS) -o $@ $^",
        "src/%.c | build": "src/%.c src/greet.h | build",
    },
    "link-duplicates": {
        "by_size[seen.st_size, seen.st_mode]": "by_size[seen.st_size, 0]",
        " and seen.st_size:": ":",
        "sorted(group)": "sorted(group, reverse=True)",
        "saved += size": "saved += 1",
        "os.replace(fresh, path)": "os.unlink(fresh)",
    },
    "lost-updates": {
        "fcntl.flock(lock, fcntl.LOCK_EX)": "pass",
        "counters.get(name, 0) + amount": "amount",
        "print(counters[name])": "print(amount)",
        "int(sys.argv[3]) if len(sys.argv) > 3 else 1": "1",
        "counters = {}": "sys.exit(1)",
    },
    "merge-config": {
        "sort_keys=True": "sort_keys=False",
        "ensure_ascii=False": "ensure_ascii=True",
        "result.pop(key, None)": "result[key] = None",
        "old + value": "value",
        "sys.exit(1)": "sys.exit(2)",
    },
    "merge-inventories": {
        ".upper()": "",
        "if total[sku]:": "if True:",
        "].strip()": "]",
        "+= int": "= int",
        "in sorted(total)": "in total",
    },
    "migrate-api": {
        "quote(self.items, currency=currency)": 'quote(self.items, currency="EUR")',
        "discount=\\1": "discount=0",
        "discount=5": "discount=50",
        'p.quote, currency="USD"': 'p.quote, currency="EUR"',
        'text = re.sub(r"def total': 'other = re.sub(r"def total',
    },
    "notes-server": {
        "itertools.count(1)": "itertools.count(0)",
        "answer(201, note)": "answer(200, note)",
        "notes.pop(self.note_id(), None)": "notes.get(self.note_id())",
        "answer(400,": "answer(422,",
        "list(notes.values())": "list(notes.values())[:1]",
    },
    "rotate-backups": {
        "last:-0} + 1": "last:-0} + 2",
        '"-$keep"': '"-$((keep + 1))"',
        "sort -n": "sort",
        '"$(dirname -- "$full")" -- "$(basename -- "$full")"': '"$full" -- .',
        "-type f -name": "-name",
    },
    "route-table": {
        "-network.prefixlen": "network.prefixlen",
        'print("invalid")': 'print("none")',
        '"none"))': '"-"))',
        ' and not line.startswith("#")': "",
        "in sys.stdin": "in list(sys.stdin)[:-1]",
    },
    "speed-up": {
        "(end, -1)": "(end + 1, -1)",
        "pairs += running": "pairs += 1",
        "max(most, running)": "running",
        "busy += moment - last": "busy += 1",
        "print(pairs, most": "print(most, pairs",
    },
    "sqlite-report": {
        "where o.status = 'paid'": "where 1",
        "sum(i.quantity * i.cents)": "sum(i.cents)",
        "limit 3": "limit 2",
        "count(*) desc, m": "count(*), m",
        "where not exists": "where exists",
    },
    "top-words": {
        "tr 'A-Z' 'a-z' | ": "",
        "${1:-10}": "${1:-5}",
        "exit 2": "exit 1",
        "-k1,1nr": "-k1,1n",
        "print $1, $2": "print $2, $1",
    },
    "../services/order-totals": {
        'page = found["next"]': "page = None",
        ' * rates[order["currency"]]': "",
        'order["customer"]]': 'order["currency"]]',
        "json.dump(totals": "json.dump({}",
        "/app/totals.json": "/app/total.json",
    },
}
"""What each solution has, and what a mistaken one has in its place."""


def test_each_example_is_there():
    assert {path.parent.name for path in EXAMPLES.parent.glob("*/*/task.toml")} == {
        name.rpartition("/")[2] for name in MISTAKES
    }
    assert {len(each) for each in MISTAKES.values()} == {5}


def test_separate_verifiers_have_the_work_in_harbor_too():
    """Which carries nothing but what `artifacts` names."""
    configs = [load_task(path.parent).config for path in EXAMPLES.parent.glob("*/*/task.toml")]
    separate = [each for each in configs if each.verifier.environment_mode == "separate"]
    assert separate
    assert all(each.artifacts for each in separate)


@pytest.fixture(scope="module")
def room():
    """As many at once as this machine is quick with."""
    return asyncio.Semaphore(2 * (os.cpu_count() or 1))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", MISTAKES)
async def test_wrong_answers_score_0(pool, room, tmp_path, name):
    async def score(number, right, wrong):
        folder = tmp_path / str(number)
        shutil.copytree(EXAMPLES / name, folder)
        script = folder / "solution/solve.sh"
        text = script.read_text()
        assert right in text
        script.write_text(text.replace(right, wrong))
        task = load_task(folder)
        task = fit(task, Room.of(pool.config)).sized(task)
        run = TaskRun(TaskImages(pool), VerifierLayers(()), task, "oracle")
        async with room:
            try:
                return (await run.play()).reward
            finally:
                await run.end()

    mistakes = MISTAKES[name] if TIMES > 1 else dict([*MISTAKES[name].items()][1::2])
    scores = await asyncio.gather(*(score(number, *mistake) for number, mistake in enumerate(mistakes.items())))
    assert dict(zip(mistakes, scores, strict=True)) == dict.fromkeys(mistakes, 0.0)
