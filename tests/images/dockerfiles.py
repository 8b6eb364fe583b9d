"""Dockerfiles for the comparison with `docker build`, a few lines for each instruction, over one build context.

`@BASE@` is an image of busybox with the users root and app (1000) and an environment, `@BUSYBOX@` the same under
another name.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

from tests.files import write_files

IGNORED = """# a comment
*.env
!keep.env
node_modules
dir/**/*.tmp
/only-top.log
"""


def make_context(at: Path) -> None:
    """The files that the Dockerfiles copy."""
    write_files(
        at,
        {
            "a.txt": "a",
            "b.txt": "b",
            "run.sh": "#!/bin/sh\necho ran\n",
            "with space.txt": "space",
            "secret.env": "secret",
            "keep.env": "keep",
            "only-top.log": "top",
            "dir/x.txt": "x",
            "dir/sub/y.txt": "y",
            "dir/sub/gone.tmp": "gone",
            "dir/only-top.log": "below",
            "dir/sub/secret.env": "below",
            "node_modules/m.js": "m",
            "glob/one.c": "1",
            "glob/two.c": "2",
            "glob/three.h": "3",
            "glob/deep/four.c": "4",
            "[odd].txt": "odd",
            "locked.txt": "locked",
            "open.txt": "open",
            "wide/w.txt": "w",
            ".hidden/h.txt": "h",
            ".dockerignore": IGNORED,
        },
    )
    (at / "empty").mkdir()
    (at / "run.sh").chmod(0o755)
    (at / "locked.txt").chmod(0o400)
    (at / "open.txt").chmod(0o666)
    (at / "wide").chmod(0o1777)
    (at / "dir/sub").chmod(0o700)
    (at / "dir/link").symlink_to("x.txt")
    (at / "dir/away").symlink_to("/etc/passwd")
    (at / "to-file").symlink_to("a.txt")
    (at / "to-dir").symlink_to("dir")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, kind, owner, mode in (
            ("top", tarfile.DIRTYPE, 1000, 0o750),
            ("top/file", tarfile.REGTYPE, 1000, 0o640),
            ("top/tool", tarfile.REGTYPE, 0, 0o4755),
            ("top/link", tarfile.SYMTYPE, 0, 0o777),
            ("top/hard", tarfile.LNKTYPE, 1000, 0o640),
            ("bare", tarfile.REGTYPE, 7, 0o666),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.uid, info.gid, info.mode = kind, owner, owner, mode
            info.linkname = {"top/link": "file", "top/hard": "top/file"}.get(name, "")
            info.size = 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"data"))
    (at / "tree.tar.gz").write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    with tarfile.open(at / "plain.tar", "w") as tar:
        info = tarfile.TarInfo("from-plain")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"ok"))
    (at / "alone.gz").write_bytes(gzip.compress(b"no tar in it", mtime=0))
    os.link(at / "a.txt", at / "a-too.txt")


DOCKERFILES = {
    # ---- FROM, ARG, ENV
    "from-alone": "FROM @BASE@",
    "arg-before-from": "ARG NAME=@BASE@\nFROM ${NAME}\nRUN echo ok > /ok",
    "arg-in-stage": 'ARG V=global\nFROM @BASE@\nARG V\nARG W=local\nARG X\nRUN echo "$V $W $X." > /args\nENV V=env\nRUN echo $V > /env',
    "arg-unset-global": 'FROM @BASE@\nARG V\nRUN echo "[$V]" > /args',
    "env-forms": "FROM @BASE@\nENV A=1 B=\"two words\" C=three\\ words\nENV OLD old value here\nENV D=$A-${B} E=\\$A F='$A'\n"
    'RUN echo "$A|$B|$C|$OLD|$D|$E|$F" > /env',
    "env-defaults": 'FROM @BASE@\nENV A=set\nENV B=${A:-x} C=${NONE:-x} D=${A:+y} E=${NONE:+y} F=${A}z G=$A/z\nRUN echo "$B$C$D$E$F$G" > /env',
    "env-same-line": 'FROM @BASE@\nENV A=old\nENV A=new B=$A\nRUN echo "$A$B" > /env',
    "env-of-base": 'FROM @BASE@\nENV PATH=/own:$PATH GREETING="$GREETING, more"\nRUN echo "$PATH|$GREETING" > /env',
    "env-run": "FROM @BASE@\nARG ONLY=arg\nENV KEPT=env\nRUN env | grep -E '^(PATH|GREETING|ONLY|KEPT|HOME)=' | sort > /env",
    # ---- RUN, SHELL
    "run-shell": 'FROM @BASE@\nRUN echo "one" > /one && \\\n    # a comment between\n    echo two > /two; exit 0\nRUN ["echo", "$HOME"]',
    "run-exec": 'FROM @BASE@\nENV A=1\nRUN ["/bin/sh", "-c", "echo $A \\"quoted\\" > /out"]\nRUN ["touch", "/a b", "/$A"]',
    "run-removes": "FROM @BASE@\nRUN rm /etc/group && rm -r /srv/app && mkdir /srv/app && echo new > /srv/app/new\nRUN mv /etc/motd /etc/moved",
    "run-modes": "FROM @BASE@\nRUN umask 077; echo a > /a; mkdir /d; mkfifo /f; chmod 6755 /a; chmod 1777 /d; chown 1000:1000 /d; ln -s /d /l; ln /a /b",
    "run-in-workdir": "FROM @BASE@\nWORKDIR /deep/er\nRUN pwd > where; cd /; echo x > y\nRUN pwd >> where",
    "stage-owners": "FROM @BASE@ AS b\nRUN mkdir -p /s/in && echo x > /s/in/f && chown -R 1000:50 /s && chmod 750 /s /s/in\n"
    "FROM @BASE@\nCOPY --from=b /s /kept\nCOPY --from=b /s/in/f /f\nCOPY --from=b --chown=root /s /roots\nCOPY --from=b /s/in /new/deep/",
    "shell": 'FROM @BASE@\nSHELL ["/bin/sh", "-ec"]\nRUN false || echo $0 $- > /out\nSHELL ["/bin/busybox", "env"]\nRUN A=1',
    "continuations": "FROM @BASE@\nRUN echo a \\\n\n  b \\\n# comment\n  c > /out\n",
    "escape-directive": "# escape=`\nFROM @BASE@\nRUN echo a `\n b > /out\nENV P=c:\\d\n",
    # ---- WORKDIR, USER
    "workdir-relative": "FROM @BASE@\nWORKDIR /a\nWORKDIR b\nWORKDIR ../c/./d\nWORKDIR /x//y/\nRUN pwd > /where",
    "workdir-variable": "FROM @BASE@\nENV D=/made/of\nWORKDIR ${D}/variables\nRUN pwd > /where",
    "workdir-existing": "FROM @BASE@\nWORKDIR /srv/app\nRUN pwd > new\nWORKDIR /etc",
    "user-name": "FROM @BASE@\nUSER app\nRUN id > /tmp/id; echo $HOME > /tmp/home; touch /tmp/mine\nUSER root\nRUN id -u > /tmp/root",
    "user-numbers": "FROM @BASE@\nUSER 1000\nRUN id -u > /tmp/u; id -g > /tmp/g\nUSER 1234:4321\nRUN id -u > /tmp/u2; id -g > /tmp/g2",
    "user-group": "FROM @BASE@\nARG WHO=app\nUSER ${WHO}:staff\nRUN id -u > /tmp/u; id -g > /tmp/g",
    # ---- COPY
    "copy-names": "FROM @BASE@\nCOPY a.txt /made\nCOPY a.txt /folder/\nCOPY a.txt b.txt /both/\nCOPY a.txt /etc\nCOPY a.txt relative\n"
    "WORKDIR /w\nCOPY a.txt .\nCOPY a.txt sub/name\nCOPY ./a.txt ./dot\nCOPY ./dir/sub/../../a.txt ./climbed",
    "copy-folders": "FROM @BASE@\nCOPY dir /d\nCOPY dir /e/\nCOPY dir/ /f\nCOPY empty /g\nCOPY dir glob /h/\nCOPY .hidden /i",
    "copy-all": "FROM @BASE@\nCOPY . /all/\n",
    "copy-to-root": "FROM @BASE@\nCOPY . /\nCOPY dir /\n",
    "copy-globs": "FROM @BASE@\nCOPY glob/*.c /c/\nCOPY glob/t* /t/\nCOPY glob/?wo.c /two\nCOPY gl[a-z]b/on[de].c /range\nCOPY *.txt /txt/\n"
    "COPY a.txt absent* /some/\nCOPY glob/** /stars/\nCOPY d** /folder/\nCOPY a.txt *.env none? /kept/",
    "copy-json": 'FROM @BASE@\nCOPY ["with space.txt", "/a b/"]\nCOPY [[]odd].txt /odd',
    "copy-links": "FROM @BASE@\nCOPY to-file /a\nCOPY to-dir /b\nCOPY dir/link /d/",
    "copy-over": "FROM @BASE@\nRUN mkdir -p /d/x.txt /e && echo old > /e/x.txt && chmod 700 /e && chown 1000 /e && ln -s /e /l\n"
    "COPY dir/x.txt /d/x.txt\nCOPY dir /e\nCOPY a.txt /l/\nCOPY b.txt /l/sub/",
    "copy-chown": "FROM @BASE@\nCOPY --chown=app a.txt /new/place/\nCOPY --chown=1000:50 dir /d\n"
    "COPY --chown=app:staff a.txt /srv/app/a\nCOPY --chown=77 a.txt /n\nCOPY --chown=root:staff a.txt b.txt /r/",
    "copy-as-user": "FROM @BASE@\nUSER app\nWORKDIR /srv/app\nCOPY a.txt .\nCOPY dir d/",
    "copy-modes": "FROM @BASE@\nCOPY run.sh locked.txt /m/\nCOPY dir/sub /s",
    "copy-variables": "FROM @BASE@\nARG F=a\nENV T=/target\nCOPY ${F}.txt $T/${F:-b}\nCOPY \"${F}.txt\" /'$T'",
    "copy-over-links": "FROM @BASE@ AS b\nRUN echo b > /f\nFROM @BASE@\nRUN ln -s /etc/motd /l && ln -s made /dangling && ln -s l /two\n"
    "COPY a.txt /l\nCOPY a.txt /dangling\nCOPY --from=b /f /two",
    # ---- stages
    "stages": "FROM @BASE@ AS build\nWORKDIR /src\nCOPY --chown=app dir .\nRUN echo made > made; chmod 4711 made; mkdir -m 700 private\n"
    "FROM @BASE@\nCOPY --from=build /src /out\nCOPY --from=0 /src/made /one\nCOPY --from=build --chown=app src/m* /glob/\nCOPY --from=BUILD /src/link /l",
    "stage-of-stage": "FROM @BASE@ AS one\nENV A=1\nUSER app\nWORKDIR /w\nFROM one AS two\nRUN echo $A; id -u > /tmp/u\nFROM two\nENV B=$A\nRUN pwd > /tmp/w",
    "stage-whole": "FROM @BASE@ AS b\nRUN mkdir -m 700 /private && echo x > /private/f && chown -R 1000:50 /private && echo new > /etc/motd && chmod 711 /srv\n"
    "FROM scratch\nCOPY --from=b / /\nFROM @BASE@\nCOPY --from=1 / /\nCOPY --from=@BUSYBOX@ / /whole/",
    "stage-from-image": "FROM @BASE@\nCOPY --from=@BUSYBOX@ /etc/motd /copied\nCOPY --from=@BUSYBOX@ /srv /srv2",
    "scratch": "FROM @BASE@ AS b\nRUN echo hi > /hi\nFROM scratch\nCOPY --from=b /hi /only\nCOPY a.txt /deep/er/\nENV A=1\nWORKDIR /w",
    # ---- ADD
    "add-archives": "FROM @BASE@\nADD tree.tar.gz /t/\nADD plain.tar /p\nADD alone.gz /alone/\nADD a.txt tree.tar.gz /mixed/\nADD dir /d",
    "add-globs": "FROM @BASE@\nADD *.tar.gz /t/\nADD p*.tar *one.gz /v/\nADD --chown=app glob/*.c /w/",
    "add-over": "FROM @BASE@\nRUN mkdir -p -m 700 /t/top && echo old > /t/top/file\nADD tree.tar.gz /t",
    "add-scratch": "FROM scratch\nADD tree.tar.gz /\n",
    # ---- what is data, and what has no effect on the tree
    "facts": 'FROM @BASE@\nCMD ["a", "b c"]\nENTRYPOINT exec me\nEXPOSE 80 53/udp\nLABEL one=1 "two words"="x y"\nSTOPSIGNAL SIGINT\n'
    "HEALTHCHECK --interval=5s CMD test -f /ok\nMAINTAINER me\nUSER app",
    "volume": 'FROM @BASE@\nRUN mkdir /v && echo before > /v/f\nVOLUME /v\nVOLUME ["/made", "/srv/app"]\nWORKDIR /after',
    "onbuild": "FROM @BASE@ AS one\nONBUILD COPY a.txt /a\nONBUILD RUN cat /a > /b\nFROM one\nRUN cat /b > /c\nONBUILD RUN exit 1",
    "started": 'FROM @BASE@\nENTRYPOINT ["b"]\nCMD ["a"]',
    "started-first": 'FROM @BASE@\nCMD ["a"]\nRUN true\nENTRYPOINT ["b"]',
    "started-later": 'FROM @BASE@ AS one\nCMD ["a"]\nFROM one\nENTRYPOINT ["b"]',
    "started-anew": 'FROM @BASE@ AS one\nENTRYPOINT ["b"]\nCMD ["a"]\nFROM one\nCMD c  $D',
    "started-by-shell": 'FROM @BASE@\nSHELL ["/bin/busybox", "sh", "-c"]\nENTRYPOINT exec $A\nCMD x  y',
    "started-by-nothing": 'FROM @BASE@ AS one\nENTRYPOINT ["b"]\nCMD ["c"]\nFROM one\nENTRYPOINT []\nCMD []',
    "health": "FROM @BASE@ AS one\nHEALTHCHECK --interval=1m30s --retries=2 CMD test -f /ok $A\nFROM one\nRUN true",
    "health-exec": 'FROM @BASE@\nHEALTHCHECK --timeout=1s --start-period=500ms CMD ["test", "-f", "/ok"]',
    "health-none": "FROM @BASE@ AS one\nHEALTHCHECK CMD a\nFROM one\nHEALTHCHECK NONE",
    "case-and-space": "from @BASE@\n   run   echo 1 > /one\n\tEnv  A=1\ncopy  a.txt   /a\n",
}

WITH_BUILDKIT = {
    "mounts": "FROM @BASE@ AS b\nRUN mkdir /s && echo made > /s/f\n"
    "FROM @BASE@\nWORKDIR /w\nRUN mkdir -p /m/deep && echo old > /m/x.txt && chmod 700 /m && chown -R 1000:50 /m && echo old > old && echo t > /tmp/t\n"
    "RUN --mount=type=bind,source=dir,target=/m,rw cat /m/x.txt > /1 && rm /m/x.txt && echo n > /m/n\n"
    "RUN --mount=source=a.txt,target=in.txt --mount=source=a.txt,target=/etc/motd cat in.txt /etc/motd > /2\n"
    "RUN --mount=target=. cat a.txt old > /3; true\n"
    "RUN --mount=from=b,target=/all --mount=from=b,source=/s/f,target=/tmp/f cat /all/s/f /tmp/f > /4\n"
    "RUN --mount=type=tmpfs,target=/tmp --mount=type=cache,target=/m,id=m ls -A /tmp /m > /5; echo x > /tmp/x; echo x > /m/x\n"
    "USER app\nRUN --mount=type=cache,target=/c,uid=1000,gid=50,mode=0750,id=c stat -c '%u %g %a' /c > /tmp/6 && touch /c/f\n"
    "RUN cat old /m/x.txt > /tmp/7",
    "chmod": "FROM @BASE@\nCOPY --chmod=700 a.txt /a\nCOPY --chmod=0640 dir /d\nADD --chmod=600 b.txt /b\nADD --chmod=700 tree.tar.gz /t/\nADD --chown=app tree.tar.gz /u/\n"
    "RUN mkdir -m 711 /e && echo old > /e/x.txt\nCOPY --chmod=600 dir/x.txt /e/\nCOPY --chmod=755 dir/x.txt /e/sub/deep/n",
    "arg-after-env": "FROM @BASE@\nARG GREETING=arg\nRUN echo $GREETING > /1\nENV GREETING=$GREETING-env\nRUN echo $GREETING > /2\nARG GREETING=last\nRUN echo $GREETING > /3",
    "ignored-parents": "FROM @BASE@\nCOPY . /all\nCOPY dir /d",
    "caches": "FROM @BASE@\nRUN --mount=type=cache,target=/srv,id=last echo 1 > /srv/a\n"
    "RUN --mount=type=cache,target=/tmp,id=last cat /tmp/a > /seen; ls /srv/app >> /seen",
    "cache-settings": "FROM @BASE@\nRUN --mount=type=cache,target=/srv,id=own,mode=0750,uid=3 echo 1 > /srv/a\n"
    "RUN --mount=type=cache,target=/tmp,id=own cat /tmp/a > /seen; true\n"
    "RUN --mount=type=cache,target=/tmp,id=own,uid=3,mode=750 cat /tmp/a >> /seen; stat -c '%a %u' /tmp >> /seen\n",
    "through-links": "FROM @BASE@ AS b\nRUN mkdir -p /s/d && echo x > /s/d/f\n"
    "FROM @BASE@\nRUN mkdir /real && ln -s real /l && ln -s /real/deep /m && ln -s ../real/up /srv/n && ln -s /real/w /w\n"
    "COPY a.txt /l/a\nCOPY dir /l/d\nCOPY a.txt /m/a\nCOPY --from=b /s/d /m/x\nCOPY --from=b /s/d/f /srv/n/\nADD tree.tar.gz /l/t/\n"
    "WORKDIR /w/in\nRUN touch here\n",
    "links-of-stages": "FROM @BASE@ AS b\nRUN mkdir -p /s/a/b && touch /s/a/b/f && ln -s a /s/l && ln -s b/f /s/a/k\n"
    "FROM @BASE@\nCOPY --from=b /s/l /x\nCOPY --from=b /s/l/ /y/\nCOPY --from=b /s/a/k /z\nCOPY --from=b /s/* /all/\n",
    "own-users": "FROM @BASE@\nRUN echo new:x:300:400::/nh:/bin/sh >> /etc/passwd; echo ng:x:400: >> /etc/group\nUSER new\nWORKDIR /nw\n"
    "COPY --chown=new:ng a.txt a\nCOPY --chown=new b.txt b\nRUN id -u > /tmp/i; id -g >> /tmp/i; echo $HOME > /tmp/h\n",
    "wide": "FROM @BASE@\nCOPY wide /w\nCOPY open.txt /o\nADD open.txt /r\nCOPY --chown=app wide open.txt /s/\n",
    "odd-targets": "FROM @BASE@\nWORKDIR /w\nCOPY a.txt ./x/\nCOPY dir ./\nCOPY dir/. ./d2\nCOPY ./dir/sub/.. ./d3/\nCOPY a.txt a.txt /s/\nCOPY --chmod=0 a.txt /z\n",
    "numbers": "FROM @BASE@\nUSER 4242\nWORKDIR /made\nUSER 4242:7\nWORKDIR too\nUSER app:staff\nWORKDIR /by/app",
}
"""Dockerfiles that BuildKit alone builds, or builds otherwise than the classic builder."""
IGNORED_BY = {"ignored-parents": "dir\n!dir/sub/y.txt\n"}
"""The .dockerignore of some of them."""

REFUSED = {
    "onbuild": ("FROM @BASE@\nONBUILD FROM other", "ONBUILD"),
    "outside": ("FROM @BASE@\nCOPY ../x /", "leads out of"),
    "missing": ("FROM @BASE@\nCOPY absent /", "is missing"),
    "ignored": ("FROM @BASE@\nCOPY secret.env /", "left out by .dockerignore"),
    "unknown": ("FROM @BASE@\nFETCH x", "FETCH"),
    "later-stage": ("FROM @BASE@\nCOPY --from=1 /a /b\nFROM @BASE@", "--from=1"),
    "no-from": ("RUN true", "FROM"),
}
"""Dockerfiles that both refuse."""
