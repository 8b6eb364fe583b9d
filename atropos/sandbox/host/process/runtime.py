"""A private copy of the server's own Python for our own programs in a slot, so that any base works and none is trusted.

The interpreter, its libraries, its dynamic loader and the few modules that these programs import are copied to one
folder, which each slot sees read-only at `/.atropos`. Search paths written into the binaries are blanked: they would
name folders that a program in the slot could make and fill.
"""

from __future__ import annotations

import importlib.util
import marshal
import os
import shutil
import struct
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

from atropos.errors import IsolationUnavailable
from atropos.sandbox.linux import pause_program
from atropos.slot_python import SLOT_PYTHON, VERIFIER_PYTHON

PAUSE = "pause"
"""The name of the program of `linux.pause_program`, in the folder."""
EMPTY = "empty"
VERIFIER_SITE = Path(__file__).parents[2] / "programs" / "verifier_site.py"
_MODULES = [
    *("encodings.aliases", "encodings.ascii", "encodings.utf_8", "encodings.latin_1", "codecs", "io", "abc"),
    *("os", "stat", "posixpath", "genericpath", "_collections_abc", "_ctypes", "_json", "_socket", "select"),
]
_LIST = """
import sys, marshal
for name in {required!r}:
    __import__(name)
files = {{}}
for name, module in list(sys.modules.items()):
    spec = getattr(module, '__spec__', None)
    files[name] = [getattr(spec, 'origin', None), getattr(module, '__file__', None), hasattr(module, '__path__')]
with open('/proc/self/maps') as maps:
    loaded = sorted({{line.split(None, 5)[5].rstrip() for line in maps if '.so' in line}})
marshal.dump([files, loaded], sys.stdout.buffer)
"""
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_HEADERS = 8192
"""The program headers stand within so many bytes of a file's start."""
_DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH, _DT_IGNORED = 5, 14, 15, 29, 0x6000_0001


def build(folder: str) -> None:
    """Copy what they need to `folder`, which has an empty file, too.

    Raises:
        IsolationUnavailable: this Python can't be copied (not an ELF program of this machine's own).
    """
    python = os.path.realpath(sys.executable)
    # Programs are started by this loader by name: PT_INTERP names a path that the slot's root may lack, or fake.
    loader = _interpreter(python)
    os.makedirs(f"{folder}/lib", 0o755)
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    stdlib = Path(folder, "lib", version)
    (stdlib / "lib-dynload").mkdir(parents=True)
    _copy_binary(python, f"{folder}/python")
    _copy_binary(loader, f"{folder}/{os.path.basename(SLOT_PYTHON[0])}")
    for library in _copy_modules(python, stdlib):
        _copy_binary(library, f"{folder}/lib/{_soname(library)}")
    site = Path(folder, os.path.basename(VERIFIER_PYTHON), "sitecustomize.py")
    site.parent.mkdir(0o755)
    shutil.copyfile(VERIFIER_SITE, site)
    site.chmod(0o444)
    cached = Path(importlib.util.cache_from_source(str(site)))
    cached.parent.mkdir(0o755)
    _compile("sitecustomize", str(VERIFIER_SITE), str(cached))
    pause = Path(folder, PAUSE)
    pause.write_bytes(pause_program.elf())
    pause.chmod(0o755)
    Path(folder, EMPTY).touch(0o444)


def _copy_modules(python: str, stdlib: Path) -> list[str]:
    """Modules as bytecode without source; returns the shared libraries that they and the interpreter load."""
    code = _LIST.format(required=_MODULES)
    # A fresh interpreter tells what these modules load; this one has loaded far more.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise IsolationUnavailable(
            f"{python} lacks a module that is needed: {done.stderr.decode(errors='replace').strip()[-300:]}"
        )
    files, loaded = marshal.loads(done.stdout)  # noqa: S302 (of the same Python)
    where = os.path.dirname(os.__file__)
    extensions: set[str] = set()
    for name, (origin, file, package) in files.items():
        source = file
        if origin == "frozen" and source is None:
            source = f"{where}/{name.replace('.', '/')}" + ("/__init__.py" if package else ".py")
        if source is None or name == "__main__" or not os.path.exists(source):
            continue
        if source.endswith(".so"):
            extensions.add(os.path.realpath(source))
            _copy_binary(source, f"{stdlib}/lib-dynload/{os.path.basename(source)}")
        elif source.endswith(".py"):
            relative = os.path.relpath(source, where)
            if not relative.startswith(".."):
                target = stdlib / f"{relative}c"
                target.parent.mkdir(parents=True, exist_ok=True)
                _compile(name, source, str(target))
    # The loader has been copied under its own name.
    return [path for path in loaded if os.path.realpath(path) not in extensions and "/ld-" not in path]


def _compile(name: str, source: str, target: str) -> None:
    """Bytecode of a module, from the interpreter's own cache where that is fresh."""
    code = SourceFileLoader(name, source).get_code(name)
    # flags 0b01: hash-based and unchecked, since there is no other source beside it
    header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
    with open(target, "wb") as file:
        file.write(header + marshal.dumps(code))


def _soname(path: str) -> str:
    """The name that others ask for a library by, which its file name may extend (libz.so.1 is libz.so.1.2.13)."""
    with open(path, "rb", buffering=0) as file:
        loads: list[tuple[int, int, int]] = []
        dynamic: dict[int, int] = {}
        for kind, offset, size, address in _program_headers(file.read(_HEADERS), path):
            if kind == _PT_LOAD:
                loads.append((address, offset, size))
            elif kind == _PT_DYNAMIC:
                dynamic = dict(struct.iter_unpack("<qQ", os.pread(file.fileno(), size, offset)))
        if _DT_SONAME not in dynamic or _DT_STRTAB not in dynamic:
            return os.path.basename(path)
        table = dynamic[_DT_STRTAB]
        start = next(table - address + offset for address, offset, size in loads if address <= table < address + size)
        return os.pread(file.fileno(), 4096, start + dynamic[_DT_SONAME]).split(b"\0", 1)[0].decode()


def _interpreter(binary: str) -> str:
    with open(binary, "rb", buffering=0) as file:
        for kind, offset, size, _ in _program_headers(file.read(_HEADERS), binary):
            if kind == _PT_INTERP:
                return os.path.realpath(os.pread(file.fileno(), size, offset).rstrip(b"\0").decode())
    raise IsolationUnavailable(f"{binary} is linked statically or isn't an ELF program; use another Python")


def _program_headers(data: bytes, name: str) -> list[tuple[int, int, int, int]]:
    """(type, file offset, size in the file, address) of each program header of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise IsolationUnavailable(f"{name} is not a 64-bit little-endian ELF file; use another Python")
    start, size, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    headers: list[tuple[int, int, int, int]] = []
    for index in range(count):
        kind, _, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, start + index * size)
        headers.append((kind, offset, length, address))
    return headers


def _copy_binary(source: str, target: str) -> None:
    """Copy what is loaded of a program or library: symbols for debuggers, which may be most of it, stay behind."""
    with open(source, "rb", buffering=0) as file, open(target, "wb", buffering=0) as copy:
        data = file.read(_HEADERS)
        headers = _program_headers(data, source)
        # Nothing after the last loaded segment is read at run time.
        end = max((offset + size for kind, offset, size, _ in headers if kind == _PT_LOAD), default=0)
        at = 0
        while at < end and (sent := os.sendfile(copy.fileno(), file.fileno(), at, end - at)):
            at += sent
        # no table of sections, which only debuggers and linkers read: e_shoff; e_shnum and e_shstrndx
        for field, zero in ((40, bytes(8)), (60, bytes(4))):
            os.pwrite(copy.fileno(), zero, field)
        for kind, offset, size, _ in headers:
            if kind == _PT_DYNAMIC:
                entries = os.pread(file.fileno(), size, offset)
                for number, (tag, _value) in enumerate(struct.iter_unpack("<qQ", entries)):
                    if tag in (_DT_RPATH, _DT_RUNPATH):
                        # The tag becomes one that loaders skip: removing the entry would move all that follow.
                        os.pwrite(copy.fileno(), struct.pack("<q", _DT_IGNORED), offset + 16 * number)
        os.fchmod(copy.fileno(), 0o755)
