"""An environment of a server for ROLL's images with Python 3.10, over GEM's HTTP, with the standard library alone.

rollgym itself needs Python 3.11. Put this file on ROLL's PYTHONPATH, and register it where ROLL registers its own
environments:

    gem.register("rollgym", entry_point="roll_python310:HttpGemEnv")

Unlike rollgym.integrations.gem:RemoteGemEnv, it does not try again when a connection breaks.
"""

import json
import os
import random
from urllib.error import HTTPError
from urllib.request import Request, urlopen

TIMEOUT_S = 600.0


class HttpGemEnv:
    """One environment on a server, with what GEM and ROLL read of an environment.

    Args:
        url: The server's address.
        environment: One of the server's catalog.
        env_kwargs: What the environment is made with; further kwargs may stand beside it, as in ROLL's `env_config`.
        seed: Seed of the first episode, where `reset` gives none; `gem.make_vec` passes it.
    """

    env_id = ""

    def __init__(self, url, environment, env_kwargs=None, seed=None, **more_kwargs):
        self._url, self._environment, self._first_seed = url, environment, seed
        self._kwargs = {**(env_kwargs or {}), **more_kwargs}
        self._sandbox = None

    def reset(self, seed=None):
        """Begin an episode in a session of its own: one that waits for the next step of training may end meanwhile."""
        self.close()
        if seed is None:
            seed, self._first_seed = self._first_seed, None
        if seed is None:
            seed = random.getrandbits(31)
        self._sandbox = self._call("make", env_id=self._environment, kwargs=self._kwargs)["sandbox_id"]
        begun = self._call("reset", sandbox_id=self._sandbox, seed=seed)
        instruction = begun["info"].get("instruction", "")
        return begun["observation"], {**_in_words_of_roll(begun["info"]), "env_instruction": instruction}

    def step(self, action):
        """Take a reply of the model. An episode at its limit of steps is terminated, too, as ROLL's own are."""
        done = self._call("step", sandbox_id=self._sandbox, action=action)
        info = _in_words_of_roll(done["info"])
        return done["observation"], done["reward"], done["terminated"], done["truncated"], info

    def close(self):
        """End the session."""
        if self._sandbox is not None:
            self._call("close", sandbox_id=self._sandbox)
            self._sandbox = None

    def _call(self, name, **body):
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get("ROLLGYM_TOKEN"):
            headers["Authorization"] = f"Bearer {token}"
        request = Request(
            f"{self._url}/apis/v1/envs/gem/{name}", json.dumps(body, default=_plain).encode(), headers
        )
        try:
            with urlopen(request, timeout=TIMEOUT_S) as answer:
                return json.load(answer)
        except HTTPError as error:
            raise RuntimeError(f"the server refused to {name}: {error.read().decode()}") from error


def _plain(value):
    """Return a mapping or list of OmegaConf, which ROLL's recipes hold, as plain data."""
    return dict(value) if hasattr(value, "keys") else list(value)


def _in_words_of_roll(info):
    """Return `info` with the metrics that ROLL collects; `messages` would replace those of its own."""
    flags = {name: info[name] for name in ("success", "action_is_valid") if name in info}
    metrics = {name: float(value) for name, value in {**flags, **(info.get("metrics") or {})}.items()}
    modes = {name: "mean" if name == "action_is_valid" else "last" for name in metrics}
    kept = {name: value for name, value in info.items() if name not in ("messages", "instruction")}
    return {**kept, "metrics": metrics, "metrics_agg_mode": modes}
