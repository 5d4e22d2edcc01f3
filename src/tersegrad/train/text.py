"""Text to train on: every text file below a folder, as bytes or as tokens learned from them.

If the folder has the subfolders ``train`` and ``validation``, they are the split; else about one file in twenty is held out, chosen by a
hash of its path (of a single file the last twentieth). Files are joined by a zero byte; files that hold a zero byte and hidden files
are left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tersegrad.core.errors import BadConfiguration
from tersegrad.core.text import require
from tersegrad.train import tokens

PREFIX = "text:"
EVERY = 20  # one file in so many is held out
USUAL = 256  # windows of an evaluation, unless told otherwise


@dataclasses.dataclass(frozen=True)
class Text:
    """Tokens to train on and tokens held out; an example is a window of ``context`` tokens and the ones that follow them."""

    name: str
    train: Tensor  # (n,) uint8 or int32
    test: Tensor
    vocabulary: int
    bytes_per_token: float  # of the text held out
    context: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return (self.context,)

    @property
    def classes(self) -> int:
        return self.vocabulary

    @property
    def count(self) -> int:
        """Examples to train on."""
        return (len(self.train) - 1) // self.context

    @property
    def count_held_out(self) -> int:
        return (len(self.test) - 1) // self.context

    @property
    def evaluated(self) -> int:
        """Examples of an evaluation, unless told otherwise."""
        return min(USUAL, self.count_held_out)

    def cut(self, context: int) -> Text:
        """The same text in windows of ``context`` tokens."""
        cut = dataclasses.replace(self, context=context)
        require(cut.count > 0, f"{self.name} has {len(self.train)} tokens to train on, too few for a context of {context}")
        require(cut.count_held_out > 0, f"{self.name} has {len(self.test)} tokens held out, too few for a context of {context}")
        return cut

    def examples(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Windows to train on, and the token that follows each of their tokens."""
        return self._windows(self.train, chosen)

    def held_out(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Windows held out."""
        return self._windows(self.test, chosen)

    def _windows(self, source: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        places = chosen[:, None] * self.context + torch.arange(self.context + 1, device=chosen.device)
        windows = source[places].long()
        return windows[:, :-1], windows[:, 1:]

    def to(self, device: torch.device) -> Text:
        """The same on a device."""
        return dataclasses.replace(self, train=self.train.to(device), test=self.test.to(device))


def load(folder: Path, vocabulary: int = 256) -> Text:
    """The text below a folder: bytes, or a larger vocabulary that is learned from a sample of what is trained on."""
    check(folder)
    train, test = _split(folder)
    # Pieces from everywhere, not the first files only.
    pieces = max(1, min(64, len(train) // (tokens.SAMPLE // 64)))
    share = min(len(train) // pieces, tokens.SAMPLE // pieces)
    sample = b"".join(train[k * len(train) // pieces :][:share] for k in range(pieces))
    tokenizer = tokens.learn(sample, vocabulary)
    known, unseen = (torch.from_numpy(np.array(tokenizer.encode(part))) for part in (train, test))
    return Text(folder.name, known, unseen, tokenizer.vocabulary, len(test) / max(1, len(unseen)))


def check(folder: Path) -> None:
    """Raise what :func:`load` would raise for a folder that is not there or has no text."""
    if not folder.is_dir():
        raise BadConfiguration(f"there is no folder {str(folder)!r}: --data text:FOLDER takes a folder of text files")
    if not any(True for _ in _files(folder)):
        raise BadConfiguration(f"{folder} holds no files")


def _files(folder: Path) -> list[Path]:
    """Files below a folder in the order of their paths, without hidden ones."""
    found = (path for path in folder.rglob("*") if path.is_file())
    visible = (path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    return sorted(visible, key=lambda path: path.relative_to(folder).as_posix())


def _read(paths: list[Path]) -> bytes:
    texts = (path.read_bytes() for path in paths)
    return b"\0".join(text for text in texts if text and b"\0" not in text)


def _split(folder: Path) -> tuple[bytes, bytes]:
    if (folder / "train").is_dir() and (folder / "validation").is_dir():
        return _read(_files(folder / "train")), _read(_files(folder / "validation"))
    held_out: list[Path] = []
    kept: list[Path] = []
    for path in _files(folder):
        digest = hashlib.blake2b(path.relative_to(folder).as_posix().encode(), digest_size=8).digest()
        (held_out if int.from_bytes(digest, "little") % EVERY == 0 else kept).append(path)
    train, test = _read(kept), _read(held_out)
    if not train or not test:
        whole = train or test
        cut = len(whole) - len(whole) // EVERY
        train, test = whole[:cut], whole[cut:]
    require(bool(train) and bool(test), f"{folder} holds too little text to train on")
    return train, test
