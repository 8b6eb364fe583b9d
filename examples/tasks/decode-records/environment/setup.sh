#!/bin/bash
python3 - <<'PY'
def record(kind, sensor, time, payload, spoil=0):
    body = len(payload).to_bytes(2, "big") + bytes((kind, sensor)) + time.to_bytes(4, "big") + payload
    return body + bytes(((sum(body) + spoil) % 256,))


data = b"RDG2\x02\x05attic\x06cellar"
data += record(1, 0, 1000, (2150).to_bytes(2, "big")) + record(1, 1, 1060, (-325).to_bytes(2, "big", signed=True))
data += record(2, 0, 1061, "door öffnet".encode()) + record(3, 1, 1100, b"\x81\x02") + record(1, 0, 1200, b"\x00\x01", 3)
open("readings.bin", "wb").write(data)
PY
