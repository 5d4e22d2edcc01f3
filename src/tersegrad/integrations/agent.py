"""torchrun's agent with one line for a failure: ``python -m tersegrad.integrations.agent`` takes torchrun's arguments.

Workers leave what went wrong in the file that torchrun names (:func:`tell`). Where one of them was told a mistake of the user's, that is
what is printed, else the failure that was first; torchrun's own summary and its traceback are not.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler

FAILURE, MISTAKE, INTERRUPTED = 1, 2, 130  # exit codes


def tell(error: BaseException) -> bool:
    """Leave an error for the agent (inside an ``except`` clause); whether there is an agent to hear it."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return False
    get_error_handler().record_exception(error)
    return True


def summary(failures: Mapping[int, Any]) -> str:
    """One line on what happened, from torchrun's failures by rank."""
    own = [f for _, f in sorted(failures.items()) if f.exitcode == MISTAKE and _message(f)]
    if own:
        return _first_line(_message(own[0]).partition(": ")[2])
    rank = min(failures, key=lambda r: (failures[r].timestamp, r))
    first = failures[rank]
    if message := _message(first):
        return f"worker {rank} failed: {_first_line(message)} (traceback: {first.error_file})"
    if first.exitcode < 0:
        with contextlib.suppress(ValueError):
            return f"worker {rank} was ended by {signal.Signals(-first.exitcode).name}"
    return f"worker {rank} ended with exit code {first.exitcode}"


def _message(failure: Any) -> str:
    """What a worker has told: "Kind: message", or nothing."""
    told = failure.error_file_data.get("message")
    return str(told.get("message", "")) if isinstance(told, dict) else ""


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def main() -> NoReturn:
    """Run torchrun's agent."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        torchrun.run(torchrun.parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        print(f"error: {summary(error.failures)}", file=sys.stderr)
        mistake = any(f.exitcode == MISTAKE and _message(f) for f in error.failures.values())
        sys.exit(MISTAKE if mistake else FAILURE)
    except (KeyboardInterrupt, SignalException):
        sys.exit(INTERRUPTED)
    sys.exit(0)


if __name__ == "__main__":
    main()
