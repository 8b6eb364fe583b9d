#!/usr/bin/env bash
# asyncssh 2.24.1: a command whose output is not UTF-8 ends the whole connection, and `run` says nothing of it: exit status 0, no output.
# A command that ran beside it comes back without output and without an exit status, no error either, and the next one cannot start.
# Who runs an agent's commands over one connection needs `encoding=None`, or an `errors=` of their own, on every call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q asyncssh==2.24.1
cat >commands.py <<'PYTHON'
import asyncio, asyncssh

async def serve(process):
    if process.command == "slow":
        await asyncio.sleep(2)
    process.stdout.write({"slow": b"done\n", "binary": b"\x89PNG\xff\n"}.get(process.command, b"hello\n"))
    process.exit(0)

class Open(asyncssh.SSHServer):
    def begin_auth(self, username):
        return False

async def main():
    key = asyncssh.generate_private_key("ssh-ed25519")
    settings = dict(server_host_keys=[key], server_factory=Open, process_factory=serve, encoding=None)
    server = await asyncssh.listen("127.0.0.1", 0, **settings)
    async with asyncssh.connect("127.0.0.1", server.get_port(), known_hosts=None, username="agent") as connection:
        slow = asyncio.create_task(connection.run("slow"))
        await asyncio.sleep(0.3)
        for name, command in {"binary": connection.run("binary"), "slow": slow, "hello": connection.run("hello")}.items():
            try:
                done = await command
                print(f"{name}: exit status {done.exit_status}, output {done.stdout!r}")
            except asyncssh.Error as error:
                print(f"{name}: {type(error).__name__}: {error}")
    server.close()

asyncio.run(main())
PYTHON
found=$(venv/bin/python commands.py)
wanted="binary: exit status 0, output ''
slow: exit status None, output ''
hello: ChannelOpenError: SSH connection closed"
echo "asyncssh 2.24.1:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
