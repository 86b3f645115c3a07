"""A child that does as it is told: `python stand_in.py STATUS_FD BEHAVIOUR [FILE]`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def speak(fd: int, state: str) -> None:
    os.write(fd, b'{"state":"%b","load":3,"detail":"here"}\n' % state.encode())


def once_more(*_: object) -> None:
    """Ends the process when it is called again."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))


def main() -> None:
    fd, behaviour, *rest = int(sys.argv[1]), *sys.argv[2:]
    speak(fd, "starting")
    match behaviour:
        case "crash":
            print("the reason of the crash", flush=True)
            sys.exit(3)
        case "misconfigured":
            sys.exit(78)
        case "silent":
            speak(fd, "ready")
        case "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            speak(fd, "ready")
        case "patient":  # ends when it is told a second time
            signal.signal(signal.SIGTERM, once_more)
            speak(fd, "ready")
        case "parent":  # with a child of its own, whose pid it leaves in a file
            grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(rest[0]).write_text(str(grandchild.pid))
            speak(fd, "ready")
        case "garbage":
            os.write(fd, b"no json\n" + b"x" * 300_000 + b"\n")
    while behaviour != "silent":
        if behaviour != "stubborn":
            speak(fd, "ready")
        time.sleep(0.05)
    time.sleep(600)


if __name__ == "__main__":
    main()
