"""Runs an agent's program in a sandbox without a network, and carries its connections to the trainer's endpoint.

    python inside.py ORDER

ORDER is a file of JSON: `socket` (the endpoint's, shown in the sandbox), `port` (offered on 127.0.0.1 in the sandbox),
`words` (the command line) and `environment`. Nothing but the standard library: it runs on the sandbox's own Python.
"""

import asyncio
import json
import os
import sys
from typing import Any

_CHUNK = 1 << 16


async def main(order: "dict[str, Any]") -> int:
    """Offer the endpoint, run the program, and return its exit code; 128 + N if signal N ended it."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_endpoint, to_endpoint = await asyncio.open_unix_connection(order["socket"])
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, to_endpoint), _pump(from_endpoint, writer))
        to_endpoint.close()
        writer.close()

    server = await asyncio.start_server(carry, "127.0.0.1", order["port"])
    try:
        environment = {**os.environ, **order["environment"]}
        program = await asyncio.create_subprocess_exec(*order["words"], env=environment)
    except OSError as error:
        sys.stderr.write(f"cannot start {order['words'][0]}: {error.strerror}\n")
        return 127
    code = await program.wait()
    server.close()
    return 128 - code if code < 0 else code


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until end of file; if one side of the connection breaks, close the other."""
    try:
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except OSError:
        writer.close()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        # Whatever the program has left running is the sandbox's to end.
        os._exit(asyncio.run(main(json.load(file))))
