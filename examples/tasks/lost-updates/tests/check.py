import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, give, main, run, same

# Four processes add at the same time while a reader looks; with "kill", holders are killed at random besides.
DRIVER = """
import json, random, subprocess, sys, threading, time
script, kill, rounds = sys.argv[1], sys.argv[2] == "kill", int(sys.argv[3])
seen, torn, done = [], [], threading.Event()
def reader():
    whole = None
    while not done.is_set():
        try:
            with open("c.json") as file:
                text = file.read()
            if text != whole:
                json.loads(text)
            whole = text
        except FileNotFoundError:
            pass
        except ValueError as problem:
            torn.append(str(problem))
        time.sleep(0.0005)
def worker(number):
    for _ in range(rounds):
        command = [sys.executable, "-S", script, "c.json", f"k{number % 2}", str(number + 1)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        if kill and random.random() < 0.4:
            time.sleep(random.random() * 0.03)
            child.kill()
            child.wait()
            continue
        out = child.communicate()[0]
        seen.append([number, child.returncode, out.decode().strip()])
watch = threading.Thread(target=reader)
watch.start()
workers = [threading.Thread(target=worker, args=(n,)) for n in range(4)]
[w.start() for w in workers]
[w.join() for w in workers]
done.set()
watch.join()
print(json.dumps({"seen": seen, "torn": torn}))
"""


# Reading and writing this many takes long enough for the four to meet.
OTHERS = {f"other{number}": number for number in range(5_000)}


def contend(work, kill, rounds):
    code, out, err = run([sys.executable, "-c", DRIVER, "counter.py", kill, rounds], cwd=work, timeout_s=240, cpu_s=240)
    same(code, 0, err[-300:])
    answer = json.loads(out)
    same(answer["torn"][:1], [], "a reader saw half a file")
    same([s for s in answer["seen"] if s[1] != 0], [], "failed updates")
    return answer["seen"], json.loads((work / "c.json").read_text())


def loses_nothing():
    with copy_of() as work:
        (work / "c.json").write_text(json.dumps(OTHERS))
        give(work)
        seen, final = contend(work, "no", 5)
        same((final.get("k0"), final.get("k1")), (5 * (1 + 3), 5 * (2 + 4)))
        same(final, {**OTHERS, "k0": final["k0"], "k1": final["k1"]})
        for key in (0, 1):
            values = [int(value) for number, _, value in seen if number % 2 == key]
            same(len(set(values)), len(values), "values printed twice")
            same(max(values), final[f"k{key}"])


def a_killed_holder_harms_nobody():
    with copy_of() as work:
        seen, final = contend(work, "kill", 4)
        for key in (0, 1):
            values = [int(value) for number, _, value in seen if number % 2 == key]
            same(len(set(values)), len(values), "values printed twice")
            assert final[f"k{key}"] >= max(values, default=0)
        amount = random.randrange(100)
        code, out, _ = run([sys.executable, "counter.py", "c.json", "after", amount], cwd=work)
        same((code, out.strip()), (0, str(amount)))


main(loses_nothing, a_killed_holder_harms_nobody)
