"""`shoal chaos`: the chaos kit of the checkout that this installation is of."""

import argparse
import subprocess
import sys
from pathlib import Path

from deploy.errors import ClusterError

CHECKOUT = Path(__file__).parent.parent
KIT = "tests.chaos"


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command; its options are the kit's own."""
    text = "break a mesh on purpose, compare every answer"
    # No prefix: whatever begins with a dash is an argument here, and an option of the kit.
    one = commands.add_parser("chaos", help=text, add_help=False, prefix_chars="\0")
    one.add_argument("arguments", nargs="*")
    one.set_defaults(function=run)


def run(args: argparse.Namespace) -> int:
    """Hand over to the kit, which is not part of the installed packages; its exit status."""
    if not (CHECKOUT / KIT.replace(".", "/")).is_dir():
        raise ClusterError("`shoal chaos` needs a checkout: the kit lies among the tests.")
    kit = [sys.executable, "-m", KIT, *args.arguments]
    return subprocess.run(kit, cwd=CHECKOUT, check=False).returncode
