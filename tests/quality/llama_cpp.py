"""llama.cpp's perplexity of the same text: what its `llama-perplexity` prints."""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

VARIABLE = "LLAMA_PERPLEXITY"


def binary() -> Path | None:
    """The one that is named, else the one on PATH. Raises `ValueError` for a name of none."""
    named = os.environ.get(VARIABLE)
    found = shutil.which(named or "llama-perplexity")
    if named and not found:
        raise ValueError(f"{VARIABLE}: {named!r} is no program")
    return Path(found) if found else None


def perplexity(program: Path, model: Path, text: str, context: int) -> tuple[int, float]:
    """How many windows it read, and its perplexity of them. Raises `ValueError` with the end of
    what it printed where it does not say.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text"
        file.write_text(text)
        command = [program, "--model", model, "--file", file, "--no-escape"]
        command += ["--ctx-size", str(context), "--batch-size", str(context)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    return said(done.stdout)


def said(output: str) -> tuple[int, float]:
    """See `perplexity`."""
    windows = re.search(r"calculating perplexity over (\d+) chunks", output)
    final = re.search(r"Final estimate: PPL = ([\d.]+)", output)
    if windows is None or final is None:
        raise ValueError(f"llama-perplexity: {output[-500:].strip()}")
    return int(windows[1]), float(final[1])
