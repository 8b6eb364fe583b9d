import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, give, main, run, same


def check_fresh_inventories_are_merged():
    rng = random.Random()
    with copy_of() as work:
        total = Counter()
        for name in ("one.csv", "two.csv"):
            lines = ["sku,pieces"]
            for _ in range(60):
                sku, pieces = f"{rng.choice('ABC')}-{rng.randrange(20)}", rng.randrange(-3, 9)
                total[sku] += pieces
                lines.append(f"{rng.choice([sku, sku.lower(), f' {sku} '])},{rng.choice(['', ' '])}{pieces}")
            (work / name).write_text("\n".join(lines) + "\n")
        give(work)
        got = run(["python3", "merge.py", "one.csv", "two.csv"], cwd=work)
        same(got[1].split(), ["sku,pieces", *(f"{sku},{total[sku]}" for sku in sorted(total) if total[sku])])


def check_the_given_files_are_merged():
    with copy_of() as work:
        got = run(["python3", "merge.py", "north.csv", "south.csv"], cwd=work)
    same(got[1].split(), ["sku,pieces", "A-1,5", "D-4,1"])


main(check_fresh_inventories_are_merged, check_the_given_files_are_merged)
