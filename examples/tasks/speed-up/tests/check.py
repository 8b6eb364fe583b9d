import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same


def answer(meetings):
    events = sorted([(a, 1) for a, _ in meetings] + [(b, 0) for _, b in meetings])
    pairs = running = most = busy = last = 0
    for moment, begins in events:
        busy += (moment - last) if running else 0
        last = moment
        if begins:
            pairs += running
            running += 1
            most = max(most, running)
        else:
            running -= 1
    return f"{pairs}\n{most}\n{busy}\n"


def meetings(rng, count, horizon):
    drawn = [(rng.randrange(horizon), rng.randrange(1, horizon // 4 + 2)) for _ in range(count)]
    return [(start, start + length) for start, length in drawn]


def is_right_and_fast():
    rng = random.Random()
    with copy_of() as work:
        for count, horizon in ((0, 5), (1, 10), (30, 20), (200, 60), (15_000, 10**9)):
            drawn = meetings(rng, count, horizon)
            text = "".join(f"{a} {b}\n" for a, b in drawn)
            # The slow program needs hours for the last one; a sort needs a fraction of a second.
            code, out, err = run([sys.executable, "overlaps.py"], cwd=work, text=text, cpu_s=1)
            same((code, out), (0, answer(drawn)), err[-200:] or f"{count} meetings")


main(is_right_and_fast)
