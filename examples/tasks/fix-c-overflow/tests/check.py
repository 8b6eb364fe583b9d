import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import PATIENCE_S, copy_of, main, run, same, started


def coded(data):
    out, i = bytearray(), 0
    while i < len(data):
        j = i
        while j < len(data) and data[j] == data[i] and j - i < 255:
            j += 1
        out += bytes((j - i, data[i]))
        i = j
    return bytes(out)


def rle(work, mode, data):
    (work / "in").write_bytes(data)
    with (
        open(work / "in", "rb") as fed,
        open(work / "out", "wb") as out,
        open(work / "err", "wb") as err,
        started(["./rle", mode], cwd=work, stdin=fed, stdout=out, stderr=err) as process,
    ):
        code = process.wait(timeout=PATIENCE_S)
    return code, (work / "out").read_bytes(), (work / "err").read_bytes()


def codes_and_decodes_anything():
    rng = random.Random()
    with copy_of() as work:
        code, _, err = run(["cc", "-O1", "-Wall", "-Werror", "-o", "rle", "rle.c"], cwd=work)
        same(code, 0, err[-300:])
        cases = [b"", b"a", b"a" * 255, b"a" * 256, b"\x00" * 300, b"\xff" * 70_000, bytes(range(256)) * 20]
        cases.append(os.urandom(100_000))
        cases.append(b"".join(bytes([rng.randrange(256)]) * rng.randrange(1, 600) for _ in range(300)))
        for data in cases:
            status, packed, _ = rle(work, "-e", data)
            same(status, 0)
            assert packed == coded(data), f"encoding of {data[:20]!r}... ({len(data)} bytes)"
            status, plain, _ = rle(work, "-d", packed)
            same(status, 0)
            assert plain == data, f"decoding of {data[:20]!r}... ({len(data)} bytes)"
        for bad in (b"\x05", b"\x01a\x02", b"\x00a", b"\x01a\x00b"):
            status, _, message = rle(work, "-d", bad)
            same((status, message), (1, b"rle: bad input\n"), repr(bad))


main(codes_and_decodes_anything)
