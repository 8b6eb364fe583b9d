"""Truth 8: isolation is proven at start-up by a probe, published, and never silently weakened."""

from __future__ import annotations

import pytest

from atropos.errors import ConfigError, IsolationUnavailable
from atropos.slots import SlotPool
from tests.settings import shows

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def capabilities(pool):
    (link,) = pool.links.values()
    return await link.client.capabilities()


async def test_findings_are_published(shared_pool):
    found = await capabilities(shared_pool)
    assert len(found.features) >= 10
    assert all(feature.ok for feature in found.features if feature.required)
    assert found.isolated == all(feature.ok for feature in found.features)
    for feature in found.features:
        assert feature.ok or feature.fix, f"{feature.name} is missing and no cure is named"
    async with shared_pool.lease("t") as slot:
        assert bool(slot.lease.limit_note) == (not found.isolated)


@shows("require_sandbox")
async def test_require_sandbox_obeys_it(engine, shared_pool):
    isolated = (await capabilities(shared_pool)).isolated
    strict = SlotPool(engine.config(slots_per_container=1, max_containers=1, require_sandbox=True))
    if isolated:
        async with strict, strict.lease("t") as slot:
            assert slot.lease.limit_note is None
    else:
        with pytest.raises(IsolationUnavailable):
            await strict.start()
    assert await engine.residue(strict.config) == []


async def test_without_bubblewrap_nothing_starts(engine, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = SlotPool(engine.config())
    with pytest.raises(IsolationUnavailable, match=r"bwrap|bubblewrap"):
        await pool.start()
    assert await engine.residue(pool.config) == []


async def test_missing_base_is_named(engine):
    pool = SlotPool(engine.config(base="/no/such/rootfs"))
    with pytest.raises(ConfigError, match=r"base.*/no/such/rootfs"):
        await pool.start()
    assert await engine.residue(pool.config) == []


async def test_egress_is_tried_at_start(local_pool, shared_pool):
    names = {"egress", "gateway"}
    assert not names & {feature.name for feature in (await capabilities(shared_pool)).features}
    async with local_pool(slots_per_container=1, max_containers=1, allow_network=True) as pool:
        found = {feature.name: feature for feature in (await capabilities(pool)).features}
        assert all(found[name].ok for name in names), found


async def test_leaky_proxy_is_found(engine, monkeypatch, tmp_path):
    """Also without require_sandbox: it would be a hole, not a missing limit."""
    tmp_path.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'atropos.sandbox.programs.egress_proxy' in sys.orig_argv:\n"
        "    from atropos.net import egress_policy\n"
        "    egress_policy.Policy.judge_addresses = lambda self, name, port, addresses, own: list(addresses)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = SlotPool(engine.config(allow_network=True))
    with pytest.raises(IsolationUnavailable, match=r"egress.*the proxy answered"):
        await pool.start()
    assert await engine.residue(pool.config) == []
