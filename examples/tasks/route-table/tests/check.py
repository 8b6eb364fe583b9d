import ipaddress
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import copy_of, give, main, run, same


def table(rng):
    """Lines of a table, and what it means."""
    lines, meaning = ["# network\tgateway"], {}
    for number in range(40):
        network = ipaddress.IPv4Network(
            (rng.choice([10, 172, 192]) << 24 | rng.getrandbits(24), rng.randrange(8, 31)), False
        )
        meaning[network] = f"gw{number}"
        lines.append(f"{network}\tgw{number}")
    again = rng.choice(list(meaning))
    meaning[again] = "later"
    lines += ["# the end", f"{again}\tlater"]
    return "\n".join(lines) + "\n", meaning


def check_the_most_specific_network_wins():
    rng = random.Random()
    for _ in range(3):
        text, meaning = table(rng)
        with copy_of() as work:
            (work / "other.tsv").write_text(text)
            give(work)
            asked = [str(network[rng.randrange(network.num_addresses)]) for network in meaning] + [
                "203.0.113.9",
                "10.0.0",
                "x",
            ]
            expected = []
            for each in asked:
                try:
                    address = ipaddress.IPv4Address(each)
                except ValueError:
                    expected.append("invalid")
                    continue
                held = [network for network in meaning if address in network]
                expected.append(meaning[max(held, key=lambda network: network.prefixlen)] if held else "none")
            got = run(["python3", "route.py", "other.tsv"], cwd=work, text="\n".join(asked) + "\n")
            same(got[1].splitlines(), expected)


def check_the_workspace_s_own_table():
    with copy_of() as work:
        got = run(["python3", "route.py", "routes.tsv"], cwd=work, text="10.20.30.9\n10.20.9.9\n10.9.9.9\n11.0.0.1\n")
        same(got[1].split(), ["bench", "lab", "core", "none"])


main(check_the_most_specific_network_wins, check_the_workspace_s_own_table)
