"""The servers that modules share, and how many tokens were compared."""

from __future__ import annotations

import pytest

from tests.inference.exactness import COUNTS
from tests.inference.servers import atroposlib, vllm


@pytest.fixture(scope="session")
def processed(tmp_path_factory):
    """vLLM, which reports the logprobs of the policy that samples, in both of its APIs."""
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm(log, "--logprobs-mode", "processed_logprobs", "--enable-scale-out") as running:
        yield running


@pytest.fixture(scope="session")
def own(tmp_path_factory):
    """atroposlib's own server."""
    with atroposlib(tmp_path_factory.mktemp("own") / "log") as running:
        yield running


def pytest_terminal_summary(terminalreporter):
    if COUNTS:
        terminalreporter.section("sampled tokens, of which 0 differ")
        for what, count in [*COUNTS.items(), ("all", sum(COUNTS.values()))]:
            terminalreporter.write_line(f"{count:>9,}  {what}")
