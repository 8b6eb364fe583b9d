#!/bin/bash
set -e
cd /workspace
cat > counter.py <<'PY'
import fcntl
import json
import os
import sys


def main():
    path, name = sys.argv[1:3]
    amount = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    # The lock is a file of its own, because the counters' file is replaced; the kernel frees it when a holder dies.
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            with open(path) as file:
                counters = json.load(file)
        except FileNotFoundError:
            counters = {}
        counters[name] = counters.get(name, 0) + amount
        fresh = f"{path}.new"
        with open(fresh, "w") as file:
            json.dump(counters, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    print(counters[name])


main()
PY
for i in 1 2 3; do python3 counter.py c.json hits & done
wait
cat c.json
rm -f c.json*
