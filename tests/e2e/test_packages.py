"""Packages install inside a slot of the image, by apt and by pip, without a network, and touch no other slot."""

from __future__ import annotations

import pytest

from atropos.slots import SlotPool
from tests.engines import params, pool_config

APT = """
mkdir -p p/DEBIAN p/usr/bin
printf 'Package: hi\\nVersion: 1\\nArchitecture: all\\nMaintainer: m <m@m>\\nDescription: d\\n' > p/DEBIAN/control
printf '#!/bin/sh\\necho hi\\n' > p/usr/bin/hi
chmod 755 p/usr/bin/hi
dpkg-deb -b p hi.deb >/dev/null && apt-get install -y ./hi.deb >/dev/null 2>&1
hi
"""
PIP = """
python3 - <<'END'
import zipfile
with zipfile.ZipFile("hello_slot-1.0-py3-none-any.whl", "w") as wheel:
    wheel.writestr("hello_slot.py", "print('hello')\\n")
    wheel.writestr("hello_slot-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: hello-slot\\nVersion: 1.0\\n")
    wheel.writestr("hello_slot-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr("hello_slot-1.0.dist-info/RECORD", "")
END
pip install -q --no-index ./hello_slot-1.0-py3-none-any.whl 2>/dev/null
cd / && python3 -m hello_slot
"""
PROGRAMS = "git curl python3 pip gcc g++ make rg jq tmux less vim.tiny ps sqlite3"


@pytest.mark.parametrize("backend", params("docker", "nomad"))
async def test_installs_touch_no_other(backend):
    async with SlotPool(pool_config(backend)) as pool, pool.lease("a") as a, pool.lease("b") as b:
        assert (await a.exec(APT, timeout_s=120)).output == "hi\n"
        assert (await a.exec(PIP, timeout_s=120)).output == "hello\n"
        others = "command -v hi || echo none; python3 -c 'import hello_slot' 2>&1 | tail -1"
        assert (await b.exec(others)).output == "none\nModuleNotFoundError: No module named 'hello_slot'\n"
        missing = await b.exec(
            f"for p in {PROGRAMS}; do command -v $p >/dev/null || echo $p; done; python3 -m venv v && v/bin/pip --version | wc -l",
            timeout_s=120,
        )
        assert missing.output == "1\n"
