"""What Dockerfiles mean, beside what the BuildKit of Docker 28.5.2 (0.25.2) was seen to make of them.

`/h` is what the build writes down of itself. The engine of the other comparison (test_docker_build.py) is older.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import pytest_asyncio

from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages
from tests import privileges
from tests.images.making import entry, folder, layer, layout, link
from tests.images.test_leases import BUSYBOX, pool_for

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    privileges.owners,
]
PEOPLE = "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/srv/app:/bin/sh\nbob:x:1001:2001::/bob:/bin/sh\n1001:x:5:6::/five:/bin/sh\n"
GROUPS = "root:x:0:\nstaff:x:50:\nvideo:x:44:app\napp:x:1000:\n"
TOOLS = "sh ls cat id env stat mkdir rmdir mv rm chmod chown find touch true sort"
LISTED = "RUN find {0} | sort > /h\n"
SEEN = {
    "a here-document is filled in": (
        'ARG X=val\nCOPY <<EOF /h\na\\$X b\\\\c d\\`e f\\n g\\"q $X \'$X\' "$X" $(x) end\\\nnext\nEOF\n',
        'a$X b\\c d`e fn g"q val \'val\' "val" $(x) end\nnext\n',
    ),
    "a here-document of a shell": (
        'ARG X=val\nRUN <<EOF\ncat > /h <<IN\nq\\$X\nIN\necho "a\\$X $X" >> /h\nEOF\n',
        "q$X\na$X val\n",
    ),
    "an indented first line": ("RUN <<-EOF\n\t#!/bin/cat\n\techo hi > /h; echo $0 >> /h\n\tEOF\n", "hi\n/bin/sh\n"),
    "groups of users": (
        (
            "RUN touch /h && chmod 666 /h\nUSER app:staff\nRUN id -G > /h; echo $HOME >> /h\nUSER app\nRUN id -G >> /h\nUSER app:50\nRUN id -G >> /h\n"
            "USER 1000\nRUN id -G >> /h\nUSER 1000:1000\nRUN id -G >> /h\nUSER :0\nRUN id -u >> /h; echo $HOME >> /h\nUSER :50\nRUN id -u >> /h; id -G >> /h\n"
        ),
        "50\n/srv/app\n1000 44\n50\n1000 44\n1000\n0\n/root\n0\n50\n",
    ),
    "names that are numbers": (
        "RUN touch /h && chmod 666 /h\nUSER 1001\nRUN id -u > /h; echo $HOME >> /h\nUSER 4242\nRUN id -u >> /h; echo $HOME >> /h\n",
        "1001\n/bob\n4242\n/\n",
    ),
    "owners": (
        (
            "COPY --chown=1001 a.txt /f\nCOPY --chown=app:50 a.txt /g\nCOPY --chown=bob a.txt /b\nCOPY --chown=:50 a.txt /c\n"
            "RUN stat -c '%n %u:%g' /f /g /b /c > /h\n"
        ),
        "/f 1001:1001\n/g 1000:50\n/b 1001:2001\n/c 0:50\n",
    ),
    "what is made for mounts": (
        (
            "RUN --mount=type=cache,target=/new/deep --mount=type=tmpfs,target=/t2 --mount=type=bind,source=dir,target=/b2/c true\n"
            "RUN --mount=type=bind,source=a.txt,target=/fnew/f true\nRUN mkdir /keep\nRUN --mount=type=cache,target=/keep/in true\n"
            "RUN --mount=type=cache,target=/w/in touch /w/file\n"
            "RUN for f in /new /t2 /b2 /fnew /keep /keep/in /w /w/in /w/file; do if [ -e $f ]; then echo $f; fi; done > /h\n"
        ),
        "/keep\n/w\n/w/file\n",
    ),
    "ARG and ENV of a stage": (
        (
            'ARG A=1 B\nENV E=$A\nFROM one AS two\nRUN echo "[$A][$E]" > /h\nARG A\nRUN echo "[$A]" >> /h\nARG E=arg\nRUN echo "[$E]" >> /h\n'
            'FROM two\nRUN echo "[$A][$E]" >> /h\nARG E\nRUN echo "[$E]" >> /h\nENV A=env\nRUN echo "[$A]" >> /h\n'
        ),
        "[1][1]\n[1]\n[arg]\n[1][1]\n[1]\n[env]\n",
    ),
    "set-user-id bits": (
        "COPY su /su\nCOPY --chown=app su /su2\nCOPY --chmod=4711 a.txt /s3\nADD su /su4\nRUN stat -c '%n %a %u' /su /su2 /s3 /su4 > /h\n",
        "/su 4755 0\n/su2 4755 1000\n/s3 4711 0\n/su4 4755 0\n",
    ),
    "modes of new folders": (
        (
            "COPY --chmod=600 a.txt /p/q/a\nCOPY --chmod=700 dir /r/s\nCOPY --chmod=640 --chown=app dir /t/u/\nCOPY --chown=app a.txt /v/a\n"
            "COPY --chmod=u=rwX,go= dir /x/y\nRUN stat -c '%n %a %u' /p /p/q /p/q/a /r /r/s /r/s/sub /t /t/u /t/u/x.txt /v /x /x/y /x/y/sub /x/y/x.txt > /h\n"
        ),
        (
            "/p 600 0\n/p/q 600 0\n/p/q/a 600 0\n/r 700 0\n/r/s 700 0\n/r/s/sub 700 0\n/t 640 1000\n/t/u 640 1000\n/t/u/x.txt 640 1000\n"
            "/v 755 1000\n/x 755 0\n/x/y 755 0\n/x/y/sub 700 0\n/x/y/x.txt 600 0\n"
        ),
    ),
    "a tmpfs over a folder": (
        (
            "RUN mkdir -m 700 /m && chown 1000:50 /m && mkdir -m 1777 /m2\n"
            "RUN --mount=type=tmpfs,target=/m --mount=type=tmpfs,target=/fresh --mount=type=tmpfs,target=/m2 stat -c '%n %a %u:%g' /m /fresh /m2 > /h\n"
            "RUN --mount=type=cache,target=/m stat -c '%n %a %u:%g' /m >> /h\n"
        ),
        "/m 700 0:0\n/fresh 1777 0:0\n/m2 1777 0:0\n/m 755 0:0\n",
    ),
    "VOLUME before its time": (
        "VOLUME /v /v2/deep\nRUN if [ -e /v ] || [ -e /v2 ]; then echo there; else echo none; fi > /h\nRUN mkdir -p /v && echo x > /v/f\nRUN ls /v >> /h\n",
        "none\nf\n",
    ),
    "--exclude": (
        "COPY --exclude=*.txt --exclude=sub dir /t/\nCOPY --exclude=sub/** dir /u/\nADD --exclude=x.txt dir /v/\n"
        + LISTED.format("/t /u /v"),
        "/t\n/u\n/u/sub\n/u/x.txt\n/v\n/v/sub\n/v/sub/y.txt\n",
    ),
    "ADD --unpack": (
        "ADD --unpack=false t.tar /t/\nADD --unpack=true t.tar /u/\nADD --unpack t.tar /w/\n"
        + LISTED.format("/t /u /w"),
        "/t\n/t/t.tar\n/u\n/u/dir\n/u/dir/sub\n/u/dir/sub/y.txt\n/u/dir/x.txt\n/w\n/w/dir\n/w/dir/sub\n/w/dir/sub/y.txt\n/w/dir/x.txt\n",
    ),
    "files that are written in it": (
        "COPY <<EOF /s.sh\n#!/bin/sh\nEOF\nCOPY --chmod=755 <<A <<B /d/\none\nA\ntwo\nB\nRUN stat -c '%n %a %u' /s.sh /d /d/A /d/B > /h\n",
        "/s.sh 644 0\n/d 755 0\n/d/A 755 0\n/d/B 755 0\n",
    ),
    "quoted here-documents": (
        "ARG X=val\nCOPY <<'A' <<\"B\" <<-'C' /d/\na\\$X $X \\\\ `x`\nA\nb\\$X ${X}\nB\n\ttab $X\n\t\ttwo\nC\nRUN cat /d/A /d/B /d/C > /h\n",
        "a\\$X $X \\\\ `x`\nb\\$X ${X}\ntab $X\ntwo\n",
    ),
    "defaults in a here-document": (
        "ARG X=val\nARG EMPTY=\nADD <<EOF /h\n${X:-d} ${N:-d} ${X:+y} ${N:+y}. ${EMPTY:-e} ${EMPTY-k}. ${N-m} $N.\nEOF\n",
        "val d y . e . m .\n",
    ),
    "patterns in variables": (
        (
            "ARG P=/usr/lib/a.tar.gz\nENV A=${P#*/} B=${P##*/} C=${P%.*} D=${P%%.*} E=${P/lib/etc} F=${P//a/o}\n"
            'RUN echo "$A $B $C $D $E $F" > /h\n'
        ),
        "usr/lib/a.tar.gz a.tar.gz /usr/lib/a.tar /usr/lib/a /usr/etc/a.tar.gz /usr/lib/o.tor.gz\n",
    ),
    "here-documents beside a command": (
        "ENV X=val\nRUN cat <<A > /h; cat <<'B' >> /h\none $X\nA\ntwo $X\nB\nRUN sh -s x <<'EOF' >> /h\necho $0 $1 $X\nEOF\n",
        "one val\ntwo $X\nsh x val\n",
    ),
    "a shell of one's own": (
        'SHELL ["/bin/sh", "-c", "echo \\"[$0]\\" >> /h"]\nRUN one  two\nRUN <<EOF\na\n  b\nEOF\n',
        "[one  two]\n[a\n  b\n]\n",
    ),
    "patterns of --exclude": (
        (
            "COPY --exclude=**/y.txt dir /t/\nCOPY --exclude=dir/x.txt --exclude=*.tar --exclude=su . /u/\n"
            "COPY --exclude=*.txt --exclude=!x.txt dir /v/\nRUN find /t /u /v | sort > /h\n"
        ),
        "/t\n/t/sub\n/t/x.txt\n/u\n/u/Dockerfile\n/u/a.txt\n/u/dir\n/u/dir/sub\n/u/dir/sub/y.txt\n/v\n/v/sub\n/v/sub/y.txt\n/v/x.txt\n",
    ),
    "a volume that is filled later": (
        "VOLUME /v\nCOPY a.txt /v/\nRUN echo x > /v/f\nVOLUME /v/in\nRUN mkdir /v/in && touch /v/in/g; find /v | sort > /h\n",
        "/v\n/v/a.txt\n/v/f\n/v/in\n/v/in/g\n",
    ),
    "bits of a stage's files": (
        (
            "RUN mkdir /g /s && touch /g/f && chown -R 1000:50 /g && chmod 2755 /g && chmod 1777 /s && chmod 6755 /g/f\nFROM one\n"
            "COPY --from=one /g /c\nCOPY --from=one --chown=app /g /d\nCOPY --from=one /s /e\nCOPY --from=one --chmod=700 /g/f /i\n"
            "RUN stat -c '%n %a %u:%g' /c /c/f /d /d/f /e /i > /h\n"
        ),
        "/c 755 0:0\n/c/f 6755 1000:50\n/d 755 1000:1000\n/d/f 6755 1000:1000\n/e 755 0:0\n/i 700 1000:50\n",
    ),
    "mounts with settings": (
        (
            "ARG T=/made\n"
            "RUN --mount=type=cache,target=$T,mode=0700,uid=1000,gid=50 --mount=type=tmpfs,target=/t,size=1m stat -c '%n %a %u:%g' /made /t > /h\n"
            "RUN --mount=type=bind,source=dir,target=/b,rw touch /b/new && ls /b >> /h\n"
            "RUN --mount=type=bind,source=dir,target=/b ls /b >> /h\n"
        ),
        "/made 700 1000:50\n/t 1777 0:0\nnew\nsub\nx.txt\nsub\nx.txt\n",
    ),
    "arguments of the platform": (
        (
            "ARG TARGETARCH TARGETOS TARGETPLATFORM TARGETVARIANT\nARG BUILDARCH=none\n"
            'RUN echo "$TARGETOS/$TARGETARCH $TARGETPLATFORM [$TARGETVARIANT] $BUILDARCH" > /h\n'
        ),
        "linux/amd64 linux/amd64 [] none\n",
    ),
    "arguments of arguments": (
        "ARG A=1\nARG A=$A-2 B=${A}x\nENV C=$B D=$C\nENV E=$C$D.\nRUN echo $A $B $C [$D] $E > /h\n",
        "1-2 1-2x 1-2x [] 1-2x.\n",
    ),
    "COPY --link over a link": (
        (
            "RUN mkdir /real && ln -s /real /l && ln -s /real /m\nCOPY a.txt /l/f\nCOPY --link a.txt /m/g\n"
            "RUN find /l /m /real /l/f /m/g | sort > /h\n"
        ),
        "/l\n/l/f\n/m\n/m/g\n/real\n/real/f\n/real/g\n",
    ),
    "modes as symbols": (
        (
            "COPY --chmod=+x a.txt /a\nCOPY --chmod=u=rw,g=r,o= a.txt /b\nCOPY --chmod=g+s,o+t dir /c\nCOPY --chmod=o-r,a+x su /d\n"
            "COPY --chmod=u=g,go+w a.txt /e\nRUN stat -c '%n %a' /a /b /c /c/x.txt /c/sub /d /e > /h\n"
        ),
        "/a 755\n/b 640\n/c 755\n/c/x.txt 2644\n/c/sub 2755\n/d 4751\n/e 466\n",
    ),
    "links that lead up behind links": (
        (
            "RUN mkdir -p /r/s /t/u && ln -s r/s /l && ln -s ../f /r/s/k && echo r > /r/f && echo top > /f && ln -s ../n/g /r/s/n\n"
            "RUN ln -s /t/u /r/s/d && ln -s d/../m /r/s/m && echo t > /t/m\n"
            "FROM one\nCOPY --from=one /l/k /o\nCOPY --from=one /l/m /p\nCOPY a.txt /l/n\nRUN cat /o /p /r/n/g > /h\n"
        ),
        "r\nt\nx",
    ),
    "users of other folders": (
        (
            "RUN touch /h && chmod 666 /h\nUSER app\nWORKDIR w/x\nCOPY a.txt .\nRUN pwd >> /h; stat -c '%n %a %u' /w /w/x a.txt >> /h\n"
            "USER bob:video\nWORKDIR ../y\nRUN stat -c '%n %u:%g' /w/y >> /h; id -u >> /h; id -G >> /h\n"
        ),
        "/w/x\n/w 755 1000\n/w/x 755 1000\na.txt 644 0\n/w/y 1001:44\n1001\n44\n",
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory):
    async with pool_for(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    if not Path(BUSYBOX).exists():
        pytest.skip("not installed: busybox-static")
    shell = entry("bin/busybox", Path(BUSYBOX).read_bytes(), mode=0o755)
    files = (
        entry("etc/passwd", PEOPLE),
        entry("etc/group", GROUPS),
        folder("tmp", mode=0o1777),
        folder("root", mode=0o700),
    )
    at = tmp_path_factory.mktemp("base")
    layout(at, layer(folder("bin"), shell, *(link(f"bin/{name}", "busybox") for name in TOOLS.split()), *files))
    return at


def make_context(at: Path) -> None:
    (at / "dir/sub").mkdir(parents=True)
    for name in ("a.txt", "su", "dir/x.txt", "dir/sub/y.txt"):
        (at / name).write_text("x")
    (at / "su").chmod(0o4755)
    with tarfile.open(at / "t.tar", "w") as tar:
        tar.add(at / "dir", "dir")


@pytest.mark.parametrize("name", SEEN)
async def test_dockerfiles_mean_the_same(pool, base, tmp_path, name):
    text, printed = SEEN[name]
    make_context(tmp_path / "context")
    (tmp_path / "context/Dockerfile").write_text(f"FROM oci:{base} AS one\n{text}")
    prepared = await TaskImages(pool, ()).prepare(load_task(tmp_path / "context/Dockerfile"))
    async with pool.lease(name, image=prepared.image) as slot:
        assert (await slot.read_file("/h")).decode() == printed
        if "/v2/deep" in text:
            assert (await slot.exec("ls -d /v2/deep", user="0")).exit_code == 0, "a container of it finds it made"
