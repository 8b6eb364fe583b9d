"""Images as templates of the E2B API."""

import shutil
from pathlib import Path

import e2b
import pytest

from tests.adapters.test_e2b import serving
from tests.images.making import entry, folder, layer, layout, link

BUSYBOX = shutil.which("busybox") or "/bin/busybox"


def test_a_templates_commands_run_as_root(tmp_path: Path, images):
    if not Path(BUSYBOX).exists():
        pytest.skip("not installed: busybox-static")
    names = ("sh", "id", "mkdir", "pwd", "cat", "printf", "chmod")
    layout(
        tmp_path / "layout",
        layer(
            folder("bin"),
            entry("bin/busybox", Path(BUSYBOX).read_bytes(), mode=0o755),
            *(link(f"bin/{name}", "busybox") for name in names),
            entry("bin/find", '#!/bin/sh\nexec /bin/busybox find "$@"\n', mode=0o755),
            entry("bin/bash", '#!/bin/sh\nexec /bin/sh "$@"\n', mode=0o755),
            entry("etc/passwd", "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/srv/app:/bin/sh\n"),
            folder("srv/app", owner=(1000, 1000)),
        ),
        config={"Env": ["PATH=/bin", "GREETING=hello"], "User": "app"},
    )
    images.push(tmp_path / "layout", "owned:1")
    settings = tmp_path / "settings.toml"
    settings.write_text(f'[pool.image_store]\nfolder = "{tmp_path}/store"\ninsecure_registries = ["{images.host}"]\n')
    with (
        serving("--slots-per-container", "2", "--config", str(settings)) as server,
        e2b.Sandbox.create(f"{images.host}/owned:1", **server.options) as sandbox,
    ):
        command = "id -u; echo $HOME $GREETING; pwd"
        assert sandbox.commands.run(command).stdout == "0\n/home/user hello\n/home/user\n"
        assert sandbox.commands.run(command, user="app").stdout == "1000\n/srv/app hello\n/home/user\n"
        sandbox.files.write("text", "of root")
        assert sandbox.commands.run("cat text").stdout == "of root"
        with pytest.raises(e2b.SandboxException, match="-printf"):  # of GNU's find
            sandbox.files.exists("text")
        for printed in ("a", "1 f f 644 many u g 0 '' /a"):
            sandbox.files.write("/bin/find", f"#!/bin/sh\nprintf '%s\\0' {printed}\n")
            with pytest.raises(e2b.SandboxException, match="can't be read"):
                sandbox.files.exists("text")
        sandbox.files.write("/bin/find", "#!/bin/sh\nprintf '%s\\0' 1 f f 644 1 u g nan '' /a\n")
        assert sandbox.files.get_info("text").modified_time.year == 9999
