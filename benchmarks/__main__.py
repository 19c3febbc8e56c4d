"""`python -m benchmarks COMMAND`: each command is a module of this package with `add_arguments` and `run`."""

import argparse
import sys

from benchmarks import cache, compile_times, eager, loader, memory, scale, steps, tfrecord, trace, transfer, zoo

COMMANDS = {
    "steps": steps,
    "trace": trace,
    "compile": compile_times,
    "transfer": transfer,
    "memory": memory,
    "eager": eager,
    "scale": scale,
    "tfrecord": tfrecord,
    "loader": loader,
    "cache": cache,
    "zoo": zoo,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        text = str(module.__doc__)
        command = commands.add_parser(
            name,
            help=text.splitlines()[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("--json", metavar="FILE", help="also write the numbers there")
        module.add_arguments(command)
    options = parser.parse_args()
    COMMANDS[options.command].run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
