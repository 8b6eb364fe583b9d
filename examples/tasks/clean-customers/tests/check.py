import csv
import io
import random
import sys
from datetime import date, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same

HEADER = ["id", "name", "email", "phone", "signup", "spend"]


def table(rng, count):
    raw, kept = [], {}
    for number in range(count):
        first, last = rng.choice(["Ada", "Jos\u00e9", "Li, Wei", 'Al "Bo"']), rng.choice(["Ng", "Smith", "O'Hara"])
        email = f"{rng.choice('abcdefg')}{rng.randrange(6)}@example.org"
        day = date(2020, 1, 1) + timedelta(days=rng.randrange(900))
        form = rng.choice(["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y"])
        shown_day, good = day.strftime(form), True
        if rng.random() < 0.1:
            shown_day, good = rng.choice(["2021-02-30", "31.04.2021", "13/01/2021", "soon", ""]), False
        shown_email = rng.choice([email, email.upper(), f" {email} "])
        if rng.random() < 0.1:
            shown_email, good = rng.choice(["@example.org", "x@", "a@b@c", "plain", ""]), False
        digits = str(rng.randrange(10**6, 10**9))
        plus = rng.random() < 0.5
        phone = ("+" if plus else "") + f"{digits[:3]} ({digits[3:5]})-{digits[5:]}"
        cents = rng.randrange(0, 10**8)
        amount = f"{cents / 100:,.2f}" if rng.random() < 0.5 else f"{cents / 100:.2f}"
        spend = rng.choice([amount, f"${amount}"])
        if rng.random() < 0.1:
            spend, cents = "", 0
        raw.append([number, f"  {first}   {last} ", shown_email, phone, shown_day, spend])
        if good:
            row = [
                str(number),
                f"{first} {last}",
                email,
                ("+" if plus else "") + digits,
                day.isoformat(),
                f"{cents // 100}.{cents % 100:02d}",
            ]
            if email not in kept or row[4] >= kept[email][4]:
                kept[email] = row
    text = io.StringIO()
    csv.writer(text, lineterminator=rng.choice(["\n", "\r\n"])).writerows([HEADER, *raw])
    return text.getvalue(), [kept[email] for email in sorted(kept)]


def cleans_fresh_tables():
    rng = random.Random()
    with copy_of() as work:
        for count in (300, 20, 0):
            text, expected = table(rng, count)
            code, out, err = run([sys.executable, "clean.py"], cwd=work, text=text)
            same(code, 0, err[-300:])
            rows = list(csv.reader(io.StringIO(out, newline="")))
            same(rows[0], HEADER, "header")
            same(rows[1:], expected, "rows")
            same("\r" in out, False, "carriage returns")


main(cleans_fresh_tables)
