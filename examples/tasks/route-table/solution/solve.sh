#!/bin/bash
set -e
cat > /workspace/route.py <<'PY'
import ipaddress
import sys

table = {}
with open(sys.argv[1]) as file:
    for line in file:
        if line.strip() and not line.startswith("#"):
            network, gateway = line.rstrip("\n").split("\t")
            table[ipaddress.IPv4Network(network)] = gateway
order = sorted(table, key=lambda network: -network.prefixlen)
for line in sys.stdin:
    try:
        address = ipaddress.IPv4Address(line.strip())
    except ValueError:
        print("invalid")
        continue
    print(next((table[network] for network in order if address in network), "none"))
PY
cd /workspace
echo 10.20.30.1 | python3 route.py routes.tsv
