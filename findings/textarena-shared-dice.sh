#!/usr/bin/env bash
# textarena 0.7.4: `reset(seed=…)` seeds Python's own generator, which all games of the process draw from. Two games of one seed and the same
# moves go the same way one after the other, and differ when they are played by turns, as the members of a group are: cards of
# Blackjack, tiles of 2048, dice of Pig.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q textarena==0.7.4
cat >check.py <<'PYTHON'
import textarena

PLAYS = {
    "Blackjack-v0": (["[Hit]"] * 3, lambda state: (state["player_hand"], state["results_summary"])),
    "2048-v0": (["[Left]", "[Up]", "[Right]", "[Down]"] * 3, lambda state: state["board"]),
    "PigDice-v0": (["[roll]"] * 6, lambda state: (state["scores"], state["turn_total"])),
}


def game(name):
    env = textarena.make(name)
    env.reset(num_players=2 if name.startswith("Pig") else 1, seed=7)
    return env


def play(envs, moves, look):
    for move in moves:
        for env in envs:
            if not env.state.done:
                env.get_observation()
                env.step(action=move)
    return [look(env.state.game_state) for env in envs]


for name, (moves, look) in PLAYS.items():
    one, two = play([game(name)], moves, look), play([game(name)], moves, look)
    first, second = play([game(name), game(name)], moves, look)
    print(f"{name}: the same one after the other {one == two}, by turns {first == second}")
PYTHON
found=$(venv/bin/python check.py)
wanted="Blackjack-v0: the same one after the other True, by turns False
2048-v0: the same one after the other True, by turns False
PigDice-v0: the same one after the other True, by turns False"
echo "textarena 0.7.4:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
