"""Python as a tool: each call is a program of its own, in a sandbox."""

from collections.abc import Callable

from envs.tools.tool import Tool, ToolError, parameters
from sandbox.core.base import Sandbox
from sandbox.core.limits import Limits
from sandbox.core.program import Program
from sandbox.core.result import Outcome, RunResult

_MOST_SHOWN = 4_000
_LONGEST = 20_000


class SandboxFailedError(RuntimeError):
    """The sandbox failed, which says nothing of the program; the episode is not to be scored."""


def python_tool(sandbox: Callable[[], Sandbox], limits: Limits) -> Tool:
    """Return the tool.

    Args:
        sandbox: Gives that in which programs run, once there is one to be run.
        limits: What one program may use.
    """

    def run(code: str) -> str:
        return _text(sandbox().run(Program("python", code), limits=limits), limits)

    return Tool(
        "python",
        "Run a Python program and return what it prints. Each program starts anew; it has no network.",
        parameters(["code"], code={"type": "string", "maxLength": _LONGEST}),
        run,
    )


def _text(result: RunResult, limits: Limits) -> str:
    if result.outcome is Outcome.SANDBOX_ERROR:
        raise SandboxFailedError(f"the sandbox failed: {result.detail}")
    printed = _shortened(result.stdout.decode(errors="replace"))
    if result.outcome is Outcome.OK:
        return printed or "nothing was printed; print what you want to know"
    said = _shortened(result.stderr.decode(errors="replace").strip()) or f"exit code {result.exit_code}"
    if result.outcome is Outcome.TIME_LIMIT:
        said = f"the program took more than {limits.wall_seconds:g} seconds"
    elif result.outcome is not Outcome.NON_ZERO_EXIT:
        said = result.detail or str(result.outcome)
    raise ToolError("\n".join(part for part in (said, printed) if part))


def _shortened(text: str) -> str:
    """Keep both ends of a long text: an error is in its last line."""
    if len(text) <= _MOST_SHOWN:
        return text.rstrip("\n")
    half = _MOST_SHOWN // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}".rstrip("\n")
