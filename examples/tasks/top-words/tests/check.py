import random
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same


def counts_words():
    rng = random.Random()
    with copy_of() as work:
        assert (work / "topwords.sh").stat().st_mode & 0o111, "not executable"
        vocabulary = ["".join(rng.choices("abcXYZ", k=rng.randrange(1, 4))) for _ in range(60)]
        text = "".join(
            rng.choice(vocabulary) + rng.choice([" ", "\n", "--", "7", "'", "\t", ", ", "\u00e9"]) for _ in range(4000)
        )
        counts = Counter(word.lower() for word in re.findall("[A-Za-z]+", text))
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        for n in (1, 7, 10, 5000):
            code, out, err = run(["./topwords.sh", n], cwd=work, text=text)
            same((code, out.splitlines()), (0, [f"{c} {w}" for w, c in ranked[:n]]), err[-200:])
        same(run(["./topwords.sh"], cwd=work, text=text)[1].splitlines(), [f"{c} {w}" for w, c in ranked[:10]])
        same(run(["./topwords.sh", 5], cwd=work, text="")[:2], (0, ""), "empty input")
        for wrong in ("0", "-1", "x", "1.5", ""):
            if wrong:
                same(run(["./topwords.sh", wrong], cwd=work, text="a")[0], 2, f"exit code for N={wrong}")


def is_a_shell_script():
    with copy_of() as work:
        same(run(["bash", "-n", "topwords.sh"], cwd=work)[0], 0)
        # A tool that must not be needed: python and perl are hidden behind programs that fail.
        (work / "bin").mkdir()
        for name in ("python3", "python", "perl"):
            (work / "bin" / name).write_text("#!/bin/sh\nexit 99\n")
            (work / "bin" / name).chmod(0o755)
        code, out, _ = run(["./topwords.sh", 1], cwd=work, text="b a b", env={"PATH": f"{work}/bin:/usr/bin:/bin"})
        same((code, out), (0, "2 b\n"))


main(counts_words, is_a_shell_script)
