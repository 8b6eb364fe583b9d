import json
import os
import sys
import time


def main():
    path, name = sys.argv[1:3]
    amount = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    counters = {}
    if os.path.exists(path):
        with open(path) as file:
            counters = json.load(file)
    time.sleep(0.001)
    counters[name] = counters.get(name, 0) + amount
    with open(path, "w") as file:
        json.dump(counters, file)
    print(counters[name])


main()
