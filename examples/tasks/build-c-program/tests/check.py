import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same


def builds_runs_and_cleans():
    rng = random.Random()
    with copy_of() as work:
        run(["make", "clean"], cwd=work)
        before = {path.name for path in work.iterdir()}
        same("stats" in before, False, "a built program in the clean tree")
        code, _, err = run(["make"], cwd=work)
        same(code, 0, err[-300:])
        for path in ("main.c", "stats.c"):
            code, _, err = run(["cc", "-O2", "-Wall", "-Wextra", "-Werror", "-c", "-o", "/dev/null", path], cwd=work)
            same(code, 0, err[-300:])
        for count in (1, 2, 5, 100, 101, 3000):
            values = [round(rng.uniform(-50, 50), 4) for _ in range(count)]
            code, out, _ = run(["./stats"], cwd=work, text=" ".join(map(str, values)) + "\n")
            lines = [line.split(" ") for line in out.splitlines()]
            same((code, lines[0]), (0, ["n", str(count)]))
            same([line[0] for line in lines], ["n", "mean", "sd", "median"])
            wanted = (statistics.fmean(values), statistics.pstdev(values), statistics.median(values))
            for (name, got), value in zip(lines[1:], wanted, strict=True):
                assert abs(float(got) - value) < 0.0011, f"{name}: {got}, expected {value}"
                same(len(got.split(".")[1]), 3, "decimals")
        same(run(["./stats"], cwd=work, text="")[:2], (0, "n 0\n"), "no numbers")
        code, out, err = run(["./stats"], cwd=work, text="1 2 x7 3")
        same((code, err.strip()), (1, "bad input: x7"))
        same(run(["make", "clean"], cwd=work)[0], 0)
        same({path.name for path in work.iterdir()}, before, "files after make clean")


main(builds_runs_and_cleans)
