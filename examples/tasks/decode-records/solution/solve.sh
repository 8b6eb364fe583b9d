#!/bin/bash
set -e
cd /workspace
cat > decode.py <<'PY'
import json
import sys

with open(sys.argv[1], "rb") as file:
    data = file.read()
try:
    if data[:4] != b"RDG2":
        raise ValueError("no RDG2 at the start")
    at, sensors = 5, []
    for _ in range(data[4]):
        name = data[at + 1 : at + 1 + data[at]]
        if len(name) != data[at]:
            raise ValueError("the sensor table is cut off")
        sensors.append(name.decode())
        at += 1 + len(name)
except (ValueError, IndexError) as problem:
    print(f"decode.py: {problem}", file=sys.stderr)
    sys.exit(1)


def value_of(kind, payload):
    if kind == 1 and len(payload) == 2:
        return "temperature", int.from_bytes(payload, "big", signed=True) / 100
    if kind == 2:
        return "text", payload.decode()
    if kind == 3:
        return "flags", [8 * i + bit for i, byte in enumerate(payload) for bit in range(8) if byte >> bit & 1]
    raise ValueError(f"type {kind}")


skipped = 0
while at < len(data):
    size = 9 + int.from_bytes(data[at : at + 2], "big")
    record = data[at : at + size]
    at += size
    try:
        if len(record) < 9 or len(record) < size or sum(record[:-1]) % 256 != record[-1]:
            raise ValueError("cut off or damaged")
        kind, value = value_of(record[2], record[8:-1])
        sensor = sensors[record[3]]
    except (ValueError, IndexError):
        skipped += 1
        continue
    print(json.dumps({"time": int.from_bytes(record[4:8], "big"), "sensor": sensor, "kind": kind, "value": value}))
print(f"skipped {skipped}", file=sys.stderr)
PY
python3 decode.py readings.bin
