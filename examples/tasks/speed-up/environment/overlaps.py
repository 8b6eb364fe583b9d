import sys

meetings = [tuple(map(int, line.split())) for line in sys.stdin if line.strip()]
pairs = 0
for i, (a, b) in enumerate(meetings):
    for c, d in meetings[i + 1 :]:
        if a < d and c < b:
            pairs += 1
most = busy = 0
for moment in range(min((m[0] for m in meetings), default=0), max((m[1] for m in meetings), default=0)):
    now = sum(1 for a, b in meetings if a <= moment < b)
    most = max(most, now)
    busy += now > 0
print(pairs, most, busy, sep="\n")
