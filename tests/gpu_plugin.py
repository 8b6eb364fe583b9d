"""A device plug-in of Nomad's that has the GPUs of a `GpuMachine`: `gpu_plugin.py FOLDER devices|files`.

With `files` it also mounts the library and the specifications; without, both are others' to bring, as with NVIDIA's.

As vendors' are: a program that serves gRPC to its agent (HashiCorp's go-plugin, protocol 2; nomad/plugins/device/proto). Messages are
written field by field, since no package has their definitions for Python.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from grpclib.const import Cardinality, Handler
from grpclib.encoding.base import CodecBase
from grpclib.server import Server

VENDOR, TYPE, NAME = "atropos", "gpu", "T1000"
DEVICE = 3
"""base.proto: PluginType."""


class Raw(CodecBase):
    """Messages as the bytes that they are."""

    __content_subtype__ = "proto"

    def encode(self, message: bytes, message_type: object) -> bytes:
        return message

    def decode(self, data: bytes, message_type: object) -> bytes:
        return data


def field(number: int, value: bytes | str | int | bool) -> bytes:
    if isinstance(value, int):
        return bytes((number << 3, value))
    data = value.encode() if isinstance(value, str) else value
    size = b""
    rest = len(data)
    while True:
        size += bytes((rest & 127 | (128 if rest > 127 else 0),))
        rest >>= 7
        if not rest:
            return bytes((number << 3 | 2,)) + size + data


class Plugin:
    """Its services; a GPU's id is its number."""

    def __init__(self, folder: Path, *, files: bool) -> None:
        self.folder = folder
        self.files = files

    async def info(self, stream) -> None:
        await stream.recv_message()
        await stream.send_message(field(1, DEVICE) + field(2, "v0.1.0") + field(3, "v0.1.0") + field(4, "gpus"))

    async def schema(self, stream) -> None:
        await stream.recv_message()
        await stream.send_message(field(1, field(1, b"")))  # an object without attributes

    async def nothing(self, stream) -> None:
        await stream.recv_message()
        await stream.send_message(b"")

    async def fingerprint(self, stream) -> None:
        await stream.recv_message()
        devices = b"".join(field(4, field(1, number) + field(2, True)) for number in ("0", "1"))
        await stream.send_message(field(1, field(1, VENDOR) + field(2, TYPE) + field(3, NAME) + devices))
        await asyncio.Event().wait()

    async def stats(self, stream) -> None:
        await stream.recv_message()
        await asyncio.Event().wait()

    async def reserve(self, stream) -> None:
        request = await stream.recv_message()
        ids = [chr(request[at + 2]) for at in range(0, len(request), 3)]  # each of one character
        library = next((self.folder / "lib").glob("*.so.*"))
        socket = self.folder / "socket"
        files = {f"/opt/gpu-test/lib/{library.name}": library, "/etc/cdi": self.folder / "cdi", f"{socket}": socket}
        nodes = [f"gpu{number}" for number in ids] + ["gpuctl"]
        parts = [
            field(2, field(1, at) + field(2, str(path)) + field(3, True)) for at, path in files.items() if self.files
        ]
        parts += [
            field(3, field(1, f"/dev/test-{name}") + field(2, f"{self.folder}/dev/{name}") + field(3, "rw"))
            for name in nodes
        ]
        await stream.send_message(field(1, b"".join(parts)))

    def __mapping__(self) -> dict[str, Handler]:
        base, device = "/hashicorp.nomad.plugins.base.proto.BasePlugin", "/hashicorp.nomad.plugins.device.DevicePlugin"
        one, many = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        served = {
            f"{base}/PluginInfo": (self.info, one),
            f"{base}/ConfigSchema": (self.schema, one),
            f"{base}/SetConfig": (self.nothing, one),
            f"{device}/Fingerprint": (self.fingerprint, many),
            f"{device}/Reserve": (self.reserve, one),
            f"{device}/Stats": (self.stats, many),
        }
        return {path: Handler(serve, cardinality, bytes, bytes) for path, (serve, cardinality) in served.items()}


async def main() -> None:
    server = Server([Plugin(Path(sys.argv[1]), files=sys.argv[2] == "files")], codec=Raw())
    await server.start("127.0.0.1", 0)
    assert server._server is not None
    port = server._server.sockets[0].getsockname()[1]
    print(f"1|2|tcp|127.0.0.1:{port}|grpc", flush=True)  # go-plugin's handshake
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(main())
