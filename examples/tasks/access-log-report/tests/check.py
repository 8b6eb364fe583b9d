import json
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same


def log_and_report(rng, lines, fail=True):
    text, expected = [], {"requests": 0, "bad_lines": 0, "status": Counter(), "bytes": 0}
    paths, failing = Counter(), Counter()
    for _ in range(lines):
        kind = rng.random()
        if kind < 0.05:
            text.append(
                rng.choice(
                    [
                        "garbage",
                        '1.2.3.4 - - [x] "GET /" 200 12',
                        "\x00\x01 \u00e9",
                        '1.1.1.1 - - [t] "GET / HTTP/1.1" 20 5',
                    ]
                )
            )
            expected["bad_lines"] += 1
            continue
        if kind < 0.08:
            text.append("")
            continue
        client = f"192.168.{rng.randrange(2)}.{rng.randrange(6)}"
        path = rng.choice(["/", "/a", "/b/c", "/d", "/e", "/f.html", "/%20x"])
        code = rng.choice([200, 204, 301, 404, 418] + ([500, 502] if fail else []))
        size = rng.choice(["-", str(rng.randrange(10**6))])
        query = rng.choice(["", "?q=1", "?a=b?c"])
        text.append(
            f'{client} - {rng.choice(["-", "bob"])} [01/Jan/2026:00:00:00 +0000] "{rng.choice(["GET", "POST"])} {path}{query} HTTP/1.1" {code} {size} "http://x/?\\"" "ua"'  # noqa: E501
        )
        expected["requests"] += 1
        expected["status"][f"{code // 100}xx"] += 1
        expected["bytes"] += 0 if size == "-" else int(size)
        paths[path] += 1
        failing[client] += code >= 500
    failing = +failing
    expected["top_paths"] = [list(p) for p in sorted(paths.items(), key=lambda i: (-i[1], i[0]))[:5]]
    expected["slowest_client"] = min(failing, key=lambda n: (-failing[n], n)) if failing else None
    return "\n".join(text) + "\n", expected


def reports_fresh_logs():
    rng = random.Random()
    with copy_of() as work:
        for lines, fail in ((800, True), (40, True), (60, False), (0, True)):
            text, expected = log_and_report(rng, lines, fail)
            (work / "fresh.log").write_text(text)
            code, out, err = run([sys.executable, "report.py", "fresh.log"], cwd=work)
            same(code, 0, err[-300:])
            got = json.loads(out)
            for field, value in expected.items():
                same(got[field], value, field)
            same(set(got), set(expected), "fields")


main(reports_fresh_logs)
