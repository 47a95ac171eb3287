"""What the proxy adds to a request: the same prompt straight to an inference server and through the proxy, in turn.

    python benchmarks/agents/overhead.py [--requests 300] [--output benchmarks/results/agent_proxy.json]

Server, proxy and client are processes of their own on loopback; the server is the tests' double of vLLM, a tiny model.
Straight, a client uses the server's own chat route; through the proxy, the prompt is rendered, matched and recorded
besides. Pairs alternate, and each way has one connection that stays open.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from rollgym.trainer.models.load import save_model  # noqa: E402
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model  # noqa: E402
from tests.support.agent_policy import tool_tokenizer  # noqa: E402
from tests.support.inference_server.running import InferenceServerProcess  # noqa: E402

_BODY = {"model": "policy", "messages": [{"role": "user", "content": "Which way?"}], "max_tokens": 8}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), options.requests)
    text = json.dumps(result, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


def measure(folder: Path, requests: int) -> dict:
    tokenizer = tool_tokenizer()
    shape = TinyPolicySettings(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=4096)
    save_model(build_tiny_model(shape, 0), tokenizer, folder / "model")
    server = InferenceServerProcess("vllm", "--model", str(folder / "model"))
    server.start()
    proxy = _proxy(folder, server.url)
    try:
        url = next(line for line in proxy.stdout if "serving on" in line).split()[3].rstrip(",")
        return _paired(server.url, url, proxy.pid, requests)
    finally:
        proxy.terminate()
        proxy.wait()
        server.stop()


def _proxy(folder: Path, upstream: str) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "rollgym.trainer.run.agent_proxy",
        "--model",
        str(folder / "model"),
        "--port",
        "0",
    ]
    command += ["--upstream", upstream, "--output", str(folder / "records.jsonl")]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _paired(server: str, proxy: str, proxy_pid: int, requests: int) -> dict:
    straight, through = [], []
    with httpx.Client(timeout=60) as first, httpx.Client(timeout=60) as second:
        for number in range(requests + 20):
            pair = [(first, f"{server}/v1/chat/completions", straight)]
            # A session for each 20 requests, as an episode would have.
            pair.append((second, f"{proxy}/s/bench-{number // 20}/v1/chat/completions", through))
            for client, url, times in pair if number % 2 else reversed(pair):
                begin = time.perf_counter()
                client.post(url, json=_BODY).raise_for_status()
                times.append(1e3 * (time.perf_counter() - begin))
            if number == 19:
                begun = _cpu_seconds(proxy_pid)
    differences = [b - a for a, b in zip(straight[20:], through[20:], strict=True)]
    return {
        "requests": requests,
        "straight_ms": _quartiles(straight[20:]),
        "through_ms": _quartiles(through[20:]),
        "added_ms": _quartiles(differences),
        "proxy_cpu_ms_per_request": round(1e3 * (_cpu_seconds(proxy_pid) - begun) / requests, 3),
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
    }


def _quartiles(values: list[float]) -> dict:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"q25": round(low, 3), "median": round(middle, 3), "q75": round(high, 3)}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
