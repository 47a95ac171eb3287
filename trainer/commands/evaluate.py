"""`roll-train eval`."""

from contextlib import AsyncExitStack
from pathlib import Path

from trainer.assembly.agents import open_player
from trainer.assembly.build import bring_weights, open_environments, open_players, task_source
from trainer.assembly.inference import check_inference
from trainer.assembly.judges import open_judges_alone
from trainer.commands.policy import trained_policy
from trainer.config.run import RunSettings
from trainer.core.console import RunConsole
from trainer.core.errors import RunError
from trainer.evaluation.evaluator import Evaluator, build_panels


async def evaluate(settings: RunSettings, checkpoint: Path | None) -> int:
    """Measure a trained policy on the panels of its run."""
    check_inference(settings)
    async with AsyncExitStack() as stack:
        console = RunConsole(settings.steps, live=False)
        policy = trained_policy(settings, checkpoint)
        settings = await open_judges_alone(settings, stack, console.say)
        pool = await stack.enter_async_context(open_environments(settings, console))
        players = await stack.enter_async_context(open_players(settings, policy, pool, console))
        await bring_weights(settings, policy, players)
        panels = await build_panels(settings, pool)
        player = await stack.enter_async_context(open_player(settings, policy, players, console))
        evaluator = Evaluator(settings, player, pool, console, panels, task_source(settings))
        evaluator.say("baseline", await evaluator.baselines())
        scores = await evaluator.measure(whole=True)
        evaluator.say("policy", scores)
        if panels and not scores:
            raise RunError("nothing could be measured; the lines above say why")
    return 0
