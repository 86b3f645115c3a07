"""The one console command, `shoal`."""

import argparse
import importlib
import sys
from pathlib import Path

from shared.config import ConfigError, read_launch

EX_CONFIG = 78
"""Exit status of a process that must not be restarted: its settings are wrong."""


def run(args: argparse.Namespace) -> int:
    """One service process, as its launch file says. The supervisor calls this."""
    service = importlib.import_module(f"services.{args.role}.service")
    service.main(read_launch(args.launch))
    return 0


def parser() -> argparse.ArgumentParser:
    """Every command and its options."""
    top = argparse.ArgumentParser(prog="shoal", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("run", help="one service process (used by the supervisor)")
    one.add_argument("role")
    one.add_argument("--launch", type=Path, required=True)
    one.set_defaults(function=run)
    return top


def main() -> None:
    """Entry point; errors of the user are one sentence."""
    args = parser().parse_args()
    try:
        sys.exit(args.function(args))
    except ConfigError as error:
        sys.stderr.write(f"shoal: {error}\n")
        sys.exit(EX_CONFIG)
