"""Memory plans of runs by their words."""

from rollgym.trainer.config.load import load_settings
from rollgym.trainer.run.memory import memory_plan, model_shape

TASKS = "tasks=[{env_id: FrozenLake-v0}]"


def plan_of(*words, gb=80.0):
    settings = load_settings(None, [TASKS, "model.max_length=2048", *words])
    return memory_plan(settings, model_shape(settings.model), int(gb * 1e9)), settings
