import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same

KEYS = ["a", "b", "c", "\u00fc"]


def value(rng, depth):
    kind = rng.random()
    if depth and kind < 0.5:
        return {key: value(rng, depth - 1) for key in rng.sample(KEYS, rng.randrange(1, 4))}
    return rng.choice([None, 1, True, "gr\u00fcn", [1], [{"x": None}], "", 2.5])


def merged(base, over):
    result = dict(base)
    for key, new in over.items():
        if new is None:
            result.pop(key, None)
        elif isinstance(new, dict):
            result[key] = merged(result[key] if isinstance(result.get(key), dict) else {}, new)
        else:
            result[key] = new
    return result


def merge(work, *contents):
    names = []
    for number, content in enumerate(contents):
        (work / f"{number}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        names.append(f"{number}.json")
    return run([sys.executable, "merge.py", *names], cwd=work)


def merges_fresh_files():
    rng = random.Random()
    with copy_of() as work:
        for count in (1, 2, 3, 3, 4):
            objects = [{key: value(rng, 3) for key in KEYS} for _ in range(count)]
            expected = {}
            for one in objects:
                expected = merged(expected, one)
            code, out, err = merge(work, *objects)
            same(code, 0, err[-300:])
            same(out, json.dumps(expected, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def appends_lists():
    with copy_of() as work:
        code, out, err = merge(
            work, {"l": [1], "d": {"m": [2]}}, {"l+": [3], "d": {"m+": [4]}, "new+": [5]}, {"l+": [6]}
        )
        same(code, 0, err[-300:])
        same(json.loads(out), {"l": [1, 3, 6], "d": {"m": [2, 4]}, "new": [5]})
        for bad in ([{"l": 1}, {"l+": [1]}], [{"l": [1]}, {"l+": 1}]):
            code, out, err = merge(work, *bad)
            same((code, out), (1, ""))


def names_bad_files():
    with copy_of() as work:
        for bad in ("{", "[1]", "7", ""):
            code, out, err = merge(work, {"a": 1}, bad)
            same((code, out, err.startswith("merge.py: 1.json: "), err.count("\n")), (1, "", True, 1), repr(bad))
        code, out, err = run([sys.executable, "merge.py", "missing.json"], cwd=work)
        same((code, out, err.startswith("merge.py: missing.json: ")), (1, "", True))


main(merges_fresh_files, appends_lists, names_bad_files)
