"""Every command as it looks on a terminal of 80 columns, the same with NO_COLOR, in a pipe, and without any terminal.

``python -m tests.cli.terminals`` in an empty folder prints JSON: for each mode and command the exit code and what was written. Torch is
imported once; each command is a child process with standard streams of its own, so that what is seen is what the commands really do.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import sys
import termios
import traceback
from pathlib import Path

COLUMNS = 80
NAMES = ["bf16", "error_feedback(sparse_dithering(alpha=0.1))", "top_k(fraction=0.01)"]
PLAN = ["plan", "--model", "resnet50", "--bandwidth", "100Mbit", "--backward-ms", "100"]
COMMANDS: tuple[list[str], ...] = (
    *([*words, "--help"] for words in ([], ["demo"], ["train"], ["plan"], ["list"], ["bounds"], ["inspect"], ["doctor"])),
    *([*words, "--help"] for words in (["bench"], ["bench", "rate"], ["bench", "speed"], ["report"])),
    ["--version"],
    ["list"],
    ["doctor"],
    ["bounds", "--alpha", "0.1"],
    ["bounds", "--omega", "1"],
    ["inspect", "gradient.tgrd"],
    ["bench", "rate", *NAMES, "--size", "1Ki", "--data", "gaussian", "--data", "laplace"],
    ["bench", "speed", *NAMES[:2], "--size", "1Ki", "--rounds", "3"],
    PLAN,
    [*PLAN, "--all", "--workers", "16", "--per-node", "8"],
    ["train", "--virtual", "2", "--epochs", "1", "--batch", "256", "--model", "mlp(width=8)", "--log", "run.jsonl"],
    ["train", "--virtual", "2", "--steps", "2", "--model", "mlp(width=8)", "--compressor", "none", "--exchange", "power_sgd"],
    ["report", "run.jsonl", "--no-open"],
    ["bench", "rate", "qsdg"],
    ["train", "--data", "/nowhere"],
    ["plan", "--model", "resnet50"],
)
MODES: dict[str, dict[str, str]] = {
    "terminal": {"TERM": "xterm-256color"},
    "no colour": {"TERM": "xterm-256color", "NO_COLOR": "1"},
    "pipe": {"TERM": "xterm-256color"},
    "no terminal": {"COLUMNS": str(COLUMNS)},
}
OURS = ("COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR", "COLORTERM", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE")


def on_terminal(mode: str) -> bool:
    """Whether the command is given a terminal."""
    return mode in ("terminal", "no colour")


def run(words: list[str], mode: str) -> tuple[int, str]:
    """The exit code of one command, and everything that it wrote."""
    if on_terminal(mode):
        pid, end = pty.fork()
        if not pid:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
            _child(words, MODES[mode])
    else:
        end, write = os.pipe()
        pid = os.fork()
        if not pid:
            os.setsid()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(write, 1)
            os.dup2(write, 2)
            os.close(end)
            os.close(write)
            _child(words, MODES[mode])
        os.close(write)
    written = b""
    while True:
        try:
            found = os.read(end, 65536)
        except OSError:  # so a terminal ends
            break
        if not found:
            break
        written += found
    os.close(end)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), written.decode()


def _child(words: list[str], variables: dict[str, str]) -> None:
    """Be the command; never returns."""
    code = 1
    try:
        for name in OURS:
            os.environ.pop(name, None)
        os.environ.update(variables)
        sys.argv = ["tersegrad", *words]
        from tersegrad.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prepare() -> None:
    """A file to inspect, a log to report, and coding that need not be measured."""
    import torch
    from tests.cli.test_plan import known

    import tersegrad
    from tersegrad import bench, engine, report  # noqa: F401 - once, for all children
    from tersegrad.bench import planning

    torch.set_num_threads(1)
    planning.coding_of = known  # type: ignore[assignment]
    x = torch.linspace(-1, 1, 1000)
    Path("gradient.tgrd").write_bytes(tersegrad.to_frame("error_feedback(sparse_dithering(alpha=0.1))", x))


if __name__ == "__main__":
    prepare()
    print(json.dumps([(mode, " ".join(words), *run(words, mode)) for mode in MODES for words in COMMANDS]))
