"""Finds the command and its arguments."""

import argparse
from collections.abc import Sequence

from xlatrainer.cli import bench, consolidate, debug_run, dump_stacks, info

__all__ = ["main"]

COMMANDS = {
    "info": info,
    "debug-run": debug_run,
    "dump-stacks": dump_stacks,
    "bench": bench,
    "consolidate": consolidate,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: default None, those of the process.

    Returns:
        The exit code; 2 for wrong arguments.
    """
    parser = argparse.ArgumentParser(prog="python -m xlatrainer", description="Tools of xlatrainer.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text = str(module.__doc__)
        command = commands.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
    options = parser.parse_args(arguments)
    return int(COMMANDS[options.command].run(options))
