"""Commands that run by settings: these are read and checked, or shown, before anything large is imported."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial

from rollgym.trainer.assembly.layout import check_model
from rollgym.trainer.cluster.placement import picture, place_roles
from rollgym.trainer.commands.arguments import add_settings
from rollgym.trainer.commands.command import Command, Invocation, Parser
from rollgym.trainer.commands.learning import large_imports, learn
from rollgym.trainer.commands.memory import plan_lines
from rollgym.trainer.config.checks import check_environments, check_settings
from rollgym.trainer.config.load import dump_settings, load_settings
from rollgym.trainer.config.pipelines import check_command
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.ending import Ending
from rollgym.trainer.core.errors import ConfigError

CarryOut = Callable[[RunSettings, argparse.Namespace, Ending], Awaitable[int]]
"""Does what a command is for, by settings, and returns the exit code."""


def settings_command(
    name: str,
    summary: str,
    description: str,
    carry_out: CarryOut,
    add_arguments: Callable[[Parser], None] = lambda parser: None,
    check: Callable[[argparse.Namespace], None] = lambda options: None,
) -> Command:
    """Return a command that runs by settings.

    Args:
        name: The word for it.
        summary: Its line in the list of commands.
        description: First paragraph of its --help.
        carry_out: Does it.
        add_arguments: Adds its arguments beside the common ones.
        check: Raises `ConfigError` for conflicting arguments, before settings are read.
    """

    def add(parser: Parser) -> None:
        add_settings(parser)
        add_arguments(parser)

    def run(invocation: Invocation) -> int:
        check(invocation.options)
        return _run(name, carry_out, invocation)

    return Command(name, summary, description, run, add)


def learning_command(name: str, summary: str, description: str) -> Command:
    """Return a command that trains, with the common options of training."""
    return settings_command(
        name, summary, description, lambda settings, options, ending: learn(settings, ending, name)
    )


def _run(name: str, carry_out: CarryOut, invocation: Invocation) -> int:
    options = invocation.options
    if options.probe and not options.dry_run:
        raise ConfigError("--probe belongs to --dry-run, which trains nothing")
    if options.device_memory is not None and not options.dry_run:
        raise ConfigError("--device-memory belongs to --dry-run, which prints the plan")
    overrides = list(options.overrides)
    if options.env_url is not None:
        overrides.append(f"env_url={options.env_url}")
    settings = invocation.settings = load_settings(options.config, overrides, name)
    if options.dry_run:
        _show(settings, options.device_memory, name)
        if not options.probe:
            return 0
        carry_out = partial(_probe, name)
    check_command(settings, name)
    return asyncio.run(_watched(carry_out, settings, options))


def _show(settings: RunSettings, device_memory: float | None, name: str) -> None:
    """Print settings, followed by the placement of models as comments: the output can be read as settings again."""
    sys.stdout.write(dump_settings(settings))
    check_command(settings, name)
    check_settings(settings)
    check_model(settings)
    lines = [*picture(place_roles(settings)).splitlines(), "", *plan_lines(settings, device_memory)]
    sys.stdout.write("".join(f"# {line}".rstrip() + "\n" for line in lines))


async def _watched(carry_out: CarryOut, settings: RunSettings, options: argparse.Namespace) -> int:
    ending = Ending()
    with ending.watching():
        return await carry_out(settings, options, ending)


async def _probe(name: str, settings: RunSettings, options: argparse.Namespace, ending: Ending) -> int:
    if name != "export":  # which meets no environment
        check_environments(settings)
    with large_imports(name):
        from transformers.utils.logging import disable_progress_bar

        from rollgym.trainer.commands.probe import probe
    disable_progress_bar()  # the command has a console of its own
    return await probe(settings)
