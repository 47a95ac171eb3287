"""An MCP server that keeps notes: what `examples/serving/mcp_tools.yaml` serves tasks for.

`python examples/mcp_notes.py` speaks MCP over its standard streams; with `--port 9000`, over HTTP at `/mcp`.
"""

import argparse
import time

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("notes", log_level="ERROR")
notes: dict[str, str] = {}


@server.tool()
def add_note(title: str, text: str) -> str:
    """Keep a note under a title."""
    notes[title] = text
    return f"kept, there are {len(notes)} notes"


@server.tool()
def read_note(title: str) -> str:
    """Return the text of a note."""
    if title not in notes:
        raise ToolError(f"there is no note {title!r}")
    return notes[title]


@server.tool()
def list_titles() -> str:
    """List the titles of all notes."""
    return ", ".join(sorted(notes)) or "there are no notes"


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    port = parser.parse_args().port
    if port is None:
        server.run()
    else:
        server.run("streamable-http", host="127.0.0.1", port=port)
