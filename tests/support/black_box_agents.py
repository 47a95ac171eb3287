"""Agents of somebody else's, as programs that import nothing of ours: `black_box_agents.py WHAT`."""

import json
import os
import subprocess
import sys
import time
import urllib.request


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"{}")


def ask(text):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}
    body |= json.loads(os.environ.get("ASK_MORE", "{}"))
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return answer["choices"][0]["message"]["content"]


def play(task):
    seen = {"observation": task["observation"], "terminated": False, "truncated": False}
    while not (seen["terminated"] or seen["truncated"]):
        action = ask(seen["observation"])
        seen = post(os.environ["ROLLGYM_ENV_URL"] + "/step", {"action": action})


def main(what):
    task = json.load(sys.stdin)
    assert task == json.loads(os.environ["ROLLGYM_TASK"])
    if "PLAYED" in os.environ:
        with open(os.environ["PLAYED"], "a", encoding="ascii") as file:
            file.write("x")
    if what not in ("silent", "just-play"):
        ask("hello")
    match what:
        case "play" | "just-play":
            play(task)
        case "play-then-crash":
            play(task)
            sys.exit(3)
        case "crash":
            print("something broke", file=sys.stderr)
            sys.exit(3)
        case "nan":
            try:
                post(os.environ["ROLLGYM_REWARD_URL"], {"reward": float("nan")})
            except urllib.error.HTTPError as error:
                sys.exit(error.code != 400)
        case "reward":
            post(os.environ["ROLLGYM_REWARD_URL"], {"reward": 0.5, "success": True})
        case "done":
            post(os.environ["ROLLGYM_REWARD_URL"].replace("reward", "end"), {"reward": 0.25})
            time.sleep(600)
        case "greedy":
            while True:
                ask("more")
        case "orphans":
            # One that has left the session, and one of its children.
            script = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
            child = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
            print(f"child {child.pid}", flush=True)
            with open(os.environ["PIDS"], "a", encoding="ascii") as file:
                file.write(f"{os.getpid()}\n{child.pid}\n")
            time.sleep(600)
        case "flood":
            while True:
                sys.stdout.write("x" * 1_000_000)
        case "chatty":
            print("x" * 5_000_000)


if __name__ == "__main__":
    main(sys.argv[1])
