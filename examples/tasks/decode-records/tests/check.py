import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, main, run, same


def record(kind, sensor, time, payload, spoil=0):
    body = len(payload).to_bytes(2, "big") + bytes((kind, sensor)) + time.to_bytes(4, "big") + payload
    return body + bytes(((sum(body) + spoil) % 256,))


def file_and_answer(rng, count, cut):
    names = rng.sample(["roof", "k\u00fcche", "x", "", "hall 2"], 3)
    data = b"RDG2\x03" + b"".join(bytes((len(n.encode()),)) + n.encode() for n in names)
    rows, skipped = [], 0
    for _ in range(count):
        sensor, time = rng.randrange(3), rng.randrange(2**32)
        draw = rng.random()
        if draw < 0.35:
            value = rng.randrange(-32768, 32768)
            data += record(1, sensor, time, value.to_bytes(2, "big", signed=True))
            rows.append({"time": time, "sensor": names[sensor], "kind": "temperature", "value": value / 100})
        elif draw < 0.55:
            text = rng.choice(["", "open", "\u00fcber\n", "x" * 700])
            data += record(2, sensor, time, text.encode())
            rows.append({"time": time, "sensor": names[sensor], "kind": "text", "value": text})
        elif draw < 0.75:
            payload = rng.randbytes(rng.randrange(0, 4))
            flags = [i for i in range(8 * len(payload)) if payload[i // 8] >> (i % 8) & 1]
            data += record(3, sensor, time, payload)
            rows.append({"time": time, "sensor": names[sensor], "kind": "flags", "value": flags})
        else:
            skipped += 1
            data += rng.choice(
                [
                    record(1, sensor, time, b"\x00\x05", rng.randrange(1, 255)),
                    record(9, sensor, time, b"abc"),
                    record(1, 7, time, b"\x00\x05"),
                    record(1, sensor, time, b"\x00"),
                    record(2, sensor, time, b"\xff\xfe"),
                ]
            )
    if cut:
        data += record(2, 0, 5, b"cut off here")[: rng.randrange(1, 20)]
        skipped += 1
    return data, rows, skipped


def decodes_fresh_files():
    rng = random.Random()
    with copy_of() as work:
        for count, cut in ((200, False), (30, True), (30, True), (0, False)):
            data, rows, skipped = file_and_answer(rng, count, cut)
            (work / "fresh.bin").write_bytes(data)
            code, out, err = run([sys.executable, "decode.py", "fresh.bin"], cwd=work)
            same(code, 0, err[-300:])
            same([json.loads(line) for line in out.splitlines()], rows)
            same(err.splitlines()[-1:], [f"skipped {skipped}"])
        for wrong in (b"", b"RDG1\x00", b"RDG2", b"RDG2\x02\x05ab"):
            (work / "wrong.bin").write_bytes(wrong)
            same(run([sys.executable, "decode.py", "wrong.bin"], cwd=work)[0], 1, f"exit code for {wrong!r}")


main(decodes_fresh_files)
