"""What operators see of a run: wandb's own offline files and Prometheus' text hold the same, true numbers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from atropos.envs import HermesAgentBaseEnv
from atropos.errors import ConfigError
from tests.e2e.hermes_support import call, make, script
from tests.settings import shows
from tests.waiting import until

WORKS = script(
    {"text": "<think>look first</think>", "calls": [call("terminal", command="echo made > made.txt; pwd")]},
    {"calls": [call("nosuch", x=1)]},
    "finished",
)


class Env(HermesAgentBaseEnv):
    name = "observed"
    scraped = ""

    async def setup(self):
        self.rows = self.load_rows()

    async def get_next_item(self):
        return next(self.rows, None)

    async def compute_reward(self, item, result, ctx):
        if self.endpoint is not None and item["prompt"] == WORKS:  # which has a slot; the others are perhaps over
            async with httpx.AsyncClient(timeout=60) as client:
                answer = await client.get(f"http://127.0.0.1:{self.endpoint.port}/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=")
            type(self).scraped = answer.text
        return float(ctx.terminal("cat made.txt")["output"] == "made\n")

    async def shutdown_tool_backend(self):
        if self.pool is not None:
            type(self).last = self.metrics_text()
        await super().shutdown_tool_backend()


def samples(text) -> dict[tuple[str, str], float]:
    """(name, the values of the labels that aren't `env`) -> value; without the histograms' buckets."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.labels.pop("env") == "observed"
            if not sample.name.endswith("_bucket"):
                found[sample.name, " ".join(sample.labels.values())] = sample.value
    return found


def records(path: Path) -> Iterator[bytes]:
    """The records of a wandb file: LevelDB's log format (32 KiB blocks; crc32, length, type) after 7 bytes of header."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):  # its end may be on its way
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if len(data) < at + 7 + length:
            return
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in {1, 4}:  # a full record, or the last part of one
            yield whole
            whole = b""


def logged(folder: Path) -> list[dict[str, object]]:
    """Every `wandb.log` of the only offline run under a folder."""
    from wandb.proto import wandb_internal_pb2

    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    found: list[dict[str, object]] = []
    for data in records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            found.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return found


@shows("metrics_address")
async def test_both_exports_agree(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows = [{"prompt": WORKS}, {"prompt": script("nothing")}]
    env = make(
        Env, policy, tmp_path, rows, use_wandb=True, metrics_address="127.0.0.1:0", tool_server_token="s3cret-token"
    )
    await env.process_manager()

    during, end = samples(Env.scraped), samples(Env.last)
    assert during["atropos_pool_slots", "leased"] >= 1
    assert during["atropos_env_tool_calls_total", ""] >= 2
    assert end["atropos_env_groups_total", ""] == 2
    assert end["atropos_env_trajectories_total", ""] == 4
    assert end["atropos_env_trajectory_stops_total", "final"] == 4
    assert end["atropos_env_tool_errors_total", ""] == 2
    assert end["atropos_env_score_mean", ""] == 0.5
    phases = {label: value for (name, label), value in end.items() if name == "atropos_env_phase_seconds_total"}
    assert set(phases) == {"setup", "model", "tools", "agent", "verify", "acquire", "reset"}
    assert all(phases[name] > 0 for name in ("model", "tools", "verify", "acquire", "reset"))
    assert end["atropos_pool_acquire_seconds_count", "warm ok"] >= 4
    assert end["atropos_pool_acquire_seconds_sum", "warm ok"] > 0
    assert end["atropos_env_verify_seconds_count", "ok"] == end["atropos_env_trajectory_seconds_count", ""] == 4
    assert end["atropos_tool_call_seconds_count", "terminal ok"] >= 2
    assert during["atropos_env_in_flight", ""] >= 1

    # wandb's own process closes its file a moment after `wandb.finish`
    await until(lambda: sum("env/groups" in entry for entry in logged(tmp_path)) == 2, "wandb's file", 60)
    history = logged(tmp_path)
    last = {key: value for entry in history for key, value in entry.items()}
    for key, name in {
        "env/groups": "groups_total",
        "env/trajectories": "trajectories_total",
        "env/tool_errors": "tool_errors_total",
        "env/tool_calls": "tool_calls_total",
        "env/score_mean": "score_mean",
    }.items():
        assert last[key] == pytest.approx(end[f"atropos_env_{name}", ""])
    for phase, seconds in phases.items():
        assert last[f"env/phase_{phase}_s"] == pytest.approx(seconds)
    assert sum(entry["train/tool_errors_count"] for entry in history) == 2
    # both in one entry, or each in its own: groups are played at once
    texts = [str(entry.get("train/tool_error_details") or "[]") for entry in history]
    details = [one for text in texts for one in json.loads(text)]
    assert [(one["turn"], one["tool_name"]) for one in details] == [(2, "nosuch"), (2, "nosuch")]
    assert {"pool/containers", "pool/free", "pool/leased", "pool/acquire_p99_s", "pool/reset_p99_s"} <= set(last)

    texts = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/**/*.json")]
    shown = "\n".join(str(row[0]) for table in texts for row in table["data"])
    assert "[thinking]" in shown or "<think>look first</think>" in shown
    assert '[call] terminal {"command": "echo made > made.txt; pwd"}' in shown
    assert "[tool]" in shown
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"s3cret-token" not in written


@pytest.mark.parametrize("setting", ["metrics_address", "dashboard_port"])
async def test_address_in_use_is_refused(policy, tmp_path, setting):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{(port := taken.getsockname()[1])}"
        given = {setting: address if setting == "metrics_address" else port}
        env = make(Env, policy, tmp_path, [{"prompt": WORKS}], **given)
        with pytest.raises(ConfigError, match=rf"^env\.{setting}: can't listen on {address}: it is in use"):
            await env.process_manager()
        assert env.pool is None


@pytest.mark.parametrize("address", ["9400", "localhost", "127.0.0.1:", "127.0.0.1:99999", ":9400"])
def test_wrong_address_is_named(policy, tmp_path, address):
    with pytest.raises(ConfigError, match=r"metrics_address: .*write 127\.0\.0\.1:9400"):
        make(Env, policy, tmp_path, [], metrics_address=address)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.7", "example.org"])
def test_public_metrics_need_token(policy, tmp_path, host):
    with pytest.raises(ConfigError, match=r"metrics_address: .* set metrics_token as well"):
        make(Env, policy, tmp_path, [], metrics_address=f"{host}:9400")
    with pytest.raises(ConfigError, match=r"metrics_token: .*at least 1"):  # of a variable that isn't set
        make(Env, policy, tmp_path, [], metrics_address=f"{host}:9400", metrics_token="")
    make(Env, policy, tmp_path, [], metrics_address=f"{host}:9400", metrics_token="t0ken")
