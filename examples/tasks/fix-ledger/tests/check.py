import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same

DRIVER = """
import json, sys
sys.path.insert(0, ".")
from ledger import Ledger, LedgerError, cents
def attempt(f):
    try:
        return f()
    except LedgerError:
        return "LedgerError"
book, other = Ledger(), Ledger()
answers = []
for step in json.load(sys.stdin):
    if step[0] == "cents":
        answers.append(attempt(lambda: cents(step[1])))
    elif step[0] == "move":
        answers.append(attempt(lambda: book.transfer(step[1], step[2], step[3], overdraft=step[4])))
    elif step[0] == "balance":
        answers.append(book.balance(step[1]))
    else:
        answers.append([book.accounts(), other.accounts(), Ledger().balance("bank")])
print(json.dumps(answers))
"""


def steps_and_answers():
    rng = random.Random()
    names = ["bank", "bank2", "rent", "ren", "food", ""]
    balance, steps, answers = {}, [], []
    for _ in range(120):
        kind = rng.choice(["cents", "move", "move", "move", "balance", "accounts"])
        if kind == "cents":
            value, places = rng.randrange(0, 100_000), rng.choice([2, 2, 2, 3])
            text = f"{value // 100}.{value % 100:02d}" + ("7" if places == 3 else "")
            steps.append([kind, text])
            answers.append("LedgerError" if places == 3 else value)
        elif kind == "move":
            source, target, amount = rng.choice(names), rng.choice(names), rng.randrange(-5, 300)
            overdraft = rng.random() < 0.5
            bad = amount <= 0 or source == target or (not overdraft and balance.get(source, 0) < amount)
            if not bad:
                balance[source] = balance.get(source, 0) - amount
                balance[target] = balance.get(target, 0) + amount
            steps.append([kind, source, target, amount, overdraft])
            answers.append("LedgerError" if bad else None)
        elif kind == "balance":
            name = rng.choice(names)
            steps.append([kind, name])
            answers.append(balance.get(name, 0))
        else:
            steps.append([kind])
            answers.append([sorted(balance), [], 0])
    return steps, answers


def visible_tests_pass():
    with copy_of() as work:
        code, _, err = run([sys.executable, "-m", "unittest", "test_ledger"], cwd=work)
        same(code, 0, err[-300:])


def behaves_as_documented():
    with copy_of() as work:
        for _ in range(3):
            steps, answers = steps_and_answers()
            code, out, err = run([sys.executable, "-c", DRIVER], cwd=work, text=json.dumps(steps))
            same(code, 0, err[-300:])
            same(json.loads(out), answers)


main(visible_tests_pass, behaves_as_documented)
