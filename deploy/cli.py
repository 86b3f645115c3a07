"""The one console command, `shoal`."""

import argparse
import contextlib
import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

from deploy import chaos, chat, control, logs, remote
from deploy.child import EX_CONFIG
from deploy.config import ClusterConfig, load
from deploy.errors import ClusterError
from deploy.run_dir import RunDir
from shared.config import ConfigError, read_launch
from shared.gguf_file import ModelFileError
from shared.kv import HASH_SIZE

DEFAULT_RUN_DIR = Path(".run/default")
ENGINES = {"real": "model", "sim": "sim"}
SIGPIPE_EXIT = 141
"""Exit status when whoever read our output wants no more (`shoal logs | head`)."""


def up(args: argparse.Namespace) -> int:
    """Start a mesh and leave it running, or stay with it."""
    config = configuration(args)
    if args.foreground:
        supervisor().foreground(config, args.run_dir)
        return 0
    ready = remote.detached(args.run_dir, args.given)
    status = control.status(args.run_dir.path)
    if not args.no_sample:
        sys.stdout.write(f"\n> {chat.SAMPLE}\n")
        chat.say(chat.sample(status.host, status.port, status.model))
        sys.stdout.write(f"\n{ready.base_url}/v1  (OpenAI API, model {status.model}, any key)\n")
    return 0


def supervisor() -> ModuleType:
    """Only a supervisor needs the bus; half a second for every other command."""
    return importlib.import_module("deploy.supervisor")


def supervise(args: argparse.Namespace) -> int:
    """The detached supervisor."""
    code: int = supervisor().background(configuration(args), args.run_dir, args.report_fd)
    return code


def configuration(args: argparse.Namespace) -> ClusterConfig:
    """What the options say, as settings."""
    overrides = list(args.settings)
    if args.model is not None:
        overrides.append(f"cluster.model={json.dumps(args.model, ensure_ascii=False)}")
    if args.port is not None:
        overrides.append(f"cluster.port={args.port}")
    if args.engine is not None:
        overrides.append(f"gpu_worker.engine={ENGINES[args.engine]}")
    return load(args.config, overrides)


def down(args: argparse.Namespace) -> int:
    """Stop a mesh; only its logs stay."""
    if not remote.down(args.run_dir):
        sys.stdout.write(f"No mesh was up in {args.run_dir.path}.\n")
    return 0


def status(args: argparse.Namespace) -> int:
    """Show every process."""
    found = control.status(args.run_dir.path)
    sys.stdout.write(control.as_json(found) if args.json else control.as_table(found))
    sys.stdout.write("\n")
    return 0


def show_logs(args: argparse.Namespace) -> int:
    """Show the ends of logs."""
    logs.show(logs.find(args.run_dir.logs, args.name), args.lines, args.follow)
    return 0


def talk(args: argparse.Namespace) -> int:
    """Chat in the terminal."""
    found = control.status(args.run_dir.path)
    if args.once is None:
        chat.converse(found.host, found.port, found.model)
    else:
        question = [{"role": "user", "content": args.once}]
        answer = chat.stream(
            found.host, found.port, found.model, question, temperature=chat.CHAT_TEMPERATURE
        )
        chat.say(answer)
    return 0


def signal(args: argparse.Namespace) -> int:
    """SIGKILL, SIGSTOP or SIGCONT."""
    control.ask(args.run_dir.path, control.Command(args.command, args.name))
    return 0


def scale(args: argparse.Namespace) -> int:
    """More or fewer processes of a role."""
    for role, count in args.counts:
        control.ask(args.run_dir.path, control.Command("scale", role, count), show)
    return 0


def rolling(args: argparse.Namespace) -> int:
    """Replace processes under load."""
    control.ask(args.run_dir.path, control.Command("rolling", names=args.names), show)
    return 0


def show(line: str) -> None:
    """One line now, not when all is done."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def kv(args: argparse.Namespace) -> int:
    """One of `shoal kv`'s own commands."""
    code: int = getattr(importlib.import_module("deploy.kv"), args.what)(args)
    return code


def role_and_count(text: str) -> tuple[str, int]:
    """`gpu_worker=3`; which roles there are, and how many are too many, the supervisor knows."""
    role, _, count = text.partition("=")
    try:
        return role, int(count)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ROLE=NUMBER") from None


def block_hash(text: str) -> bytes:
    """The name of a block."""
    with contextlib.suppress(ValueError):
        if len(name := bytes.fromhex(text)) == HASH_SIZE:
            return name
    raise argparse.ArgumentTypeError(f"{text!r} is not {2 * HASH_SIZE} hex digits")


def run(args: argparse.Namespace) -> int:
    """One service process, as its launch file says. The supervisor calls this."""
    service = importlib.import_module(f"services.{args.role}.service")
    service.main(read_launch(args.launch))
    return 0


def parser() -> argparse.ArgumentParser:
    """Every command and its options."""
    here = argparse.ArgumentParser(add_help=False)
    here.add_argument(
        "--run-dir",
        type=lambda text: RunDir(Path(text).expanduser()),
        default=RunDir(DEFAULT_RUN_DIR),
        metavar="DIR",
        help=f"of the mesh; one per mesh (default: {DEFAULT_RUN_DIR})",
    )
    top = argparse.ArgumentParser(prog="shoal", description="LLM inference as a mesh.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, function: object, text: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, parents=[here], help=text, description=text)
        one.set_defaults(function=function)
        return one

    _up_options(command("up", up, "start a mesh, see it answer, keep it running"))
    command("down", down, "stop a mesh; only its logs stay")
    one = command("status", status, "every process: state, load, restarts")
    one.add_argument("--json", action="store_true", help="for programs")
    one = command("logs", show_logs, "the end of each log, or of one")
    one.add_argument("name", nargs="?", default="", help="gpu_worker-0, nats, supervisor, …")
    one.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    one.add_argument("-n", "--lines", type=int, default=logs.TAIL_LINES, metavar="N")
    one = command("chat", talk, "talk to a running mesh")
    one.add_argument("--once", metavar="PROMPT", help="one question, one streamed answer")
    for verb, text in (
        ("kill", "SIGKILL a process; it is started again"),
        ("pause", "SIGSTOP a process; a service that is silent for 10 s is killed"),
        ("resume", "SIGCONT a paused process"),
    ):
        command(verb, signal, text).add_argument("name", help="as in `shoal status`")
    _kv_commands(commands, here)
    chaos.add_to(commands)
    one = command("scale", scale, "more or fewer processes of a role, while the mesh serves")
    one.add_argument("counts", nargs="+", type=role_and_count, metavar="ROLE=NUMBER")
    one = command("rolling", rolling, "replace all service processes one by one, while they serve")
    one.add_argument("names", nargs="*", metavar="NAME", help="of processes or roles; none = all")
    _hidden(commands, here)
    return top


def _up_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE", help="over cluster.toml")
    one.add_argument("--config", type=Path, metavar="FILE", help="over the default cluster.toml")
    one.add_argument("--model", metavar="PATH", help="a .gguf file or a Hugging Face directory")
    one.add_argument("--engine", choices=ENGINES, help="sim = no model is computed")
    one.add_argument("--port", type=int, metavar="N", help="of HTTP; 0 = any free one")
    one.add_argument("--no-sample", action="store_true", help="ask no question at the end")
    how = one.add_mutually_exclusive_group()
    how.add_argument("--foreground", action="store_true", help="stay; Ctrl-C stops the mesh")
    how.add_argument("--detach", action="store_true", help="leave it running (the default)")


def _kv_commands(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", here: argparse.ArgumentParser
) -> None:
    text = "what the caches of KV blocks hold"
    whats = commands.add_parser("kv", help=text, description=text).add_subparsers(
        dest="what", required=True, metavar="WHAT"
    )

    def what(name: str, text: str) -> argparse.ArgumentParser:
        one = whats.add_parser(name, parents=[here], help=text, description=text)
        one.set_defaults(function=kv)
        return one

    one = what("stats", "each Redis, the L1 of each worker, and what was asked of them")
    one.add_argument("--json", action="store_true", help="for programs")
    one = what("ls", "blocks in L2: size, codec, model, when they expire")
    one.add_argument("-n", "--limit", type=int, default=100, metavar="N", help="(default: 100)")
    one.add_argument("--json", action="store_true", help="for programs")
    one = what("get", "one block in L2, checked to its last bit")
    one.add_argument("hash", type=block_hash, help="32 hex digits, as `shoal kv ls` shows them")
    one.add_argument("--json", action="store_true", help="for programs")
    one = what("flush", "delete every block in L2, and nothing else")
    one.add_argument("--yes", action="store_true", help="it is meant")


def _hidden(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", here: argparse.ArgumentParser
) -> None:
    """What only Shoal itself calls; without `help`, argparse does not list them."""
    one = commands.add_parser("supervise", parents=[here])
    one.add_argument("--report-fd", type=int, required=True)
    _up_options(one)
    one.set_defaults(function=supervise)
    one = commands.add_parser("run")
    one.add_argument("role")
    one.add_argument("--launch", type=Path, required=True)
    one.set_defaults(function=run)


def main() -> None:
    """Entry point; what the user can mend is one sentence."""
    given = sys.argv[1:]
    args = parser().parse_args(given)
    args.given = given[given.index(args.command) + 1 :]
    try:
        code = args.function(args)
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:
        if args.function in {run, supervise}:  # not the terminal: a bug of ours
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit(SIGPIPE_EXIT)
    except (ConfigError, ModelFileError) as error:  # starting it again would not help
        sys.stderr.write(f"{error}\n")
        sys.exit(EX_CONFIG)
    except ClusterError as error:
        sys.stderr.write(f"shoal: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
