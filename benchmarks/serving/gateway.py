"""What a gateway adds to a step: python benchmarks/serving/gateway.py [--sessions 1 64] [--rounds 3] [--out FILE].

One node and one gateway before it share a core, our client has the other. The same sessions are played at the node,
through the gateway and at a bare echo of equal bytes in turns: single steps, all in flight at once, and one batch a
step. CPU is that of each process.
"""

import asyncio
import sys
from pathlib import Path

import processes
from turns import of_processes, read_options, report, take_turns, wait_for

SERVE = [sys.executable, "-m", "rollgym.env_server", "--port", "0", "--workers", "1", "--log-level", "error"]
GATEWAY = [*SERVE, "--gateway", "--allow-network", "loopback"]
COLUMNS = {
    "steps/s": "steps_per_s",
    "gateway CPU µs a step": "gateway_cpu_us_per_step",
    "node CPU µs a step": "node_cpu_us_per_step",
    "echo CPU µs a step": "echo_cpu_us_per_step",
    "p50 ms": "p50_ms",
}


def main() -> None:
    options = read_options(__doc__)
    with processes.server(GATEWAY) as gateway:
        gateway_url = f"http://127.0.0.1:{gateway.port}"
        with (
            processes.server([*SERVE, "--register", gateway_url]) as node,
            processes.server([sys.executable, str(Path(__file__).with_name("echo.py"))]) as echo,
        ):
            asyncio.run(wait_for(gateway_url))
            pids = {"gateway": gateway.pid, "node": node.pid, "echo": echo.pid}
            cases = {
                "direct": of_processes(f"http://127.0.0.1:{node.port}", pids),
                "through the gateway": of_processes(gateway_url, pids),
                "echo": of_processes(f"http://127.0.0.1:{echo.port}", pids),
            }
            rows = take_turns(options, cases)
    report(options, rows, COLUMNS)


if __name__ == "__main__":
    main()
