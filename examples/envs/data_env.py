"""A data-analysis env with a background process: a service feeds measurements, the agent answers a question on them.

    python -m examples.envs.data_env process --env.tokenizer_name ... --openai.base_url ... --openai.server_type vllm

The feed runs in the slot while the agent works (it may look at it with the process tool or curl); the reward function
compares the number in the agent's /workspace/answer.json with the one that follows from the seed.
"""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

from atropos.envs import HermesAgentBaseEnv, HermesAgentEnvConfig, ToolContext

SENSORS = ("attic", "cellar", "hall")
FEED = """
import http.server, json, sys
rows = json.load(open(sys.argv[1]))
class Feed(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(rows[int(self.path.strip("/") or 0)::10]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Feed).serve_forever()
"""


def measurements(seed: int) -> list[dict[str, Any]]:
    """The measurements of a seed, always the same."""
    rng = random.Random(seed)
    return [{"sensor": rng.choice(SENSORS), "celsius": round(rng.gauss(20, 5), 2)} for _ in range(500)]


class DataEnv(HermesAgentBaseEnv):
    """1.0 for the right number, 0.0 otherwise."""

    name = "data_env"
    env_config_cls: Any = HermesAgentEnvConfig

    async def setup(self) -> None:
        """Items are seeds."""
        self.seeds = iter(range(10_000))

    async def get_next_item(self) -> Any:
        """The next seed, with a sensor to ask about."""
        seed = next(self.seeds, None)
        return None if seed is None else {"name": f"seed-{seed}", "seed": seed, "sensor": SENSORS[seed % len(SENSORS)]}

    def format_prompt(self, item: Any) -> str:
        """The question."""
        return (
            "A service at http://127.0.0.1:8000/PAGE (PAGE from 0 to 9) gives measurements as JSON lists. Find the "
            f'median of celsius over all pages for the sensor {item["sensor"]!r} and write {{"median": NUMBER}}, '
            "rounded to two decimals, to /workspace/answer.json."
        )

    async def setup_rollout(self, item: Any, ctx: ToolContext) -> None:
        """Start the feed, and wait until it answers."""
        ctx.write_file("/opt/feed/feed.py", FEED)
        ctx.write_file("/opt/feed/rows.json", json.dumps(measurements(item["seed"])))
        ask = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/0').read()"
        up = ctx.terminal(
            "(setsid python3 /opt/feed/feed.py /opt/feed/rows.json >/dev/null 2>&1 &)\n"
            f'for i in $(seq 100); do python3 -c "{ask}" 2>/dev/null && exit 0; sleep 0.1; done; exit 1'
        )
        assert up["exit_code"] == 0, "the feed did not start"

    async def compute_reward(self, item: Any, result: Any, ctx: ToolContext) -> float:
        """Compare the numbers."""
        values = [row["celsius"] for row in measurements(item["seed"]) if row["sensor"] == item["sensor"]]
        try:
            answer = json.loads(ctx.read_file("answer.json").get("content", ""))["median"]
            return float(abs(float(answer) - statistics.median(values)) < 0.006)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return 0.0


if __name__ == "__main__":
    DataEnv.cli()
