"""Regularised least squares and logistic regression, their smoothness, their optimum, and how workers share the data.

    f(x) = (1/N) sum_j loss_j(x) + lambda/2 ||x||^2,       lambda = 1/100 of the smoothness of the mean loss,

so that the condition number is at most 101. Split over n workers, worker i holds a run of rows sorted by label, and
f_i = (n/N) sum of its losses + lambda/2 ||x||^2: the mean of the f_i is f for every n, and so is the optimum.
"""

from __future__ import annotations

import dataclasses
import lzma
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kind = Literal["ridge", "logistic"]

REGULARISATION = 1e-2
EMBEDDED: dict[str, Kind] = {"diabetes": "ridge", "breast_cancer": "logistic"}
# name: (kind, dimension); the files are LIBSVM's, the dimensions those that LIBSVM's page states
LIBSVM: dict[str, tuple[Kind, int]] = {
    "housing_scale": ("ridge", 13),
    "abalone_scale": ("ridge", 8),
    "german.numer_scale": ("logistic", 24),
    "splice": ("logistic", 60),
    "mushrooms": ("logistic", 112),
    "a9a": ("logistic", 123),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A data set with a loss; everything in float64."""

    name: str
    kind: Kind
    features: Array  # (N, d), rows sorted by label
    labels: Array  # (N,), -1 and 1 for logistic regression

    @property
    def dimension(self) -> int:
        return int(self.features.shape[1])

    @cached_property
    def loss_smoothness(self) -> float:
        """Smoothness of the mean loss, without the regulariser."""
        return _largest(self.features) * _curvature(self.kind) / len(self.features)

    @cached_property
    def regulariser(self) -> float:
        return REGULARISATION * self.loss_smoothness

    @cached_property
    def smoothness(self) -> float:
        return self.loss_smoothness + self.regulariser

    @cached_property
    def strong_convexity(self) -> float:
        """Exact for ridge; the regulariser alone for logistic regression, whose losses are flat far away."""
        if self.kind == "logistic":
            return self.regulariser
        return float(np.linalg.eigvalsh(self.hessian(np.zeros(self.dimension)))[0])

    @property
    def condition(self) -> float:
        return self.smoothness / self.strong_convexity

    def hessian(self, x: Array) -> Array:
        """The Hessian of f at x."""
        weighted = self.features
        if self.kind == "logistic":
            slope = _sigmoid(-self.labels * (self.features @ x))
            weighted = self.features * (slope * (1 - slope))[:, None]
        return self.features.T @ weighted / len(self.features) + self.regulariser * np.eye(self.dimension)

    @cached_property
    def optimum(self) -> Array:
        """The minimiser, by Newton's method until rounding stops it."""
        whole = Split(self, 1)
        x = np.zeros(self.dimension)
        size = np.inf
        for _ in range(100):
            gradient = whole.gradients(x)[0]
            previous, size = size, float(np.linalg.norm(gradient))
            if size == 0 or (size < 1e-12 and size > previous / 2):
                break
            x = x - np.linalg.solve(self.hessian(x), gradient)
        return x


@dataclasses.dataclass(frozen=True)
class Split:
    """A problem's rows, in the order of their labels, dealt to ``workers`` in equal runs."""

    problem: Problem
    workers: int

    @cached_property
    def _edges(self) -> list[int]:
        return [round(k * len(self.problem.labels) / self.workers) for k in range(self.workers + 1)]

    @cached_property
    def _runs(self) -> list[slice]:
        return [slice(a, b) for a, b in zip(self._edges, self._edges[1:])]

    @cached_property
    def _quadratics(self) -> tuple[Array, Array]:
        """Hessians (n, d, d) and linear terms (n, d) of the workers' least-squares losses."""
        p, scale = self.problem, self.workers / len(self.problem.labels)
        grams = np.stack([scale * p.features[r].T @ p.features[r] for r in self._runs])
        return grams + p.regulariser * np.eye(p.dimension), np.stack(
            [scale * p.features[r].T @ p.labels[r] for r in self._runs]
        )

    def gradients(self, x: Array) -> Array:
        """The workers' gradients at x, (n, d)."""
        p = self.problem
        if p.kind == "ridge":
            hessians, linear = self._quadratics
            return np.asarray(hessians @ x - linear)
        scale = self.workers / len(p.labels)
        rows = []
        for matrix, run in zip(self._blocks, self._runs):
            labels = p.labels[run]
            rows.append(matrix.T @ (-labels * _sigmoid(-labels * (matrix @ x)) * scale))
        return np.asarray(np.stack(rows) + p.regulariser * x)

    @cached_property
    def _blocks(self) -> list[Any]:
        """The workers' features, as sparse matrices where most entries are zero."""
        blocks = [self.problem.features[r] for r in self._runs]
        if np.count_nonzero(self.problem.features) > self.problem.features.size / 4:
            return blocks
        from scipy import sparse

        return [sparse.csr_matrix(b) for b in blocks]

    @cached_property
    def smoothness(self) -> Array:
        """The workers' own smoothness constants, (n,)."""
        p, scale = self.problem, self.workers / len(self.problem.labels) * _curvature(self.problem.kind)
        return np.array([_largest(p.features[r]) * scale + p.regulariser for r in self._runs])

    @cached_property
    def heterogeneity(self) -> float:
        """zeta^2: mean over workers of ||grad f_i||^2 at the optimum. Zero for one worker."""
        return float(np.square(self.gradients(self.problem.optimum)).sum(axis=1).mean())


def _curvature(kind: Kind) -> float:
    return 0.25 if kind == "logistic" else 1.0


def _largest(rows: Array) -> float:
    """Largest eigenvalue of rows^T rows."""
    gram = rows.T @ rows if rows.shape[0] > rows.shape[1] else rows @ rows.T
    return float(np.linalg.eigvalsh(gram)[-1])


def _sigmoid(z: Array) -> Array:
    e = np.exp(-np.abs(z))
    return np.asarray(np.where(z >= 0, 1 / (1 + e), e / (1 + e)))


def _prepare(name: str, kind: Kind, features: Array, labels: Array) -> Problem:
    """Standardised columns for dense real-valued features, centred targets for ridge, labels -1 and 1 for logistic, sorted."""
    if kind == "ridge":
        labels = (labels - labels.mean()) / labels.std()
    else:
        labels = np.where(labels == labels.max(), 1.0, -1.0)
    if kind == "ridge" or name in EMBEDDED:
        spread = features.std(axis=0)
        features = (features - features.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    order = np.argsort(labels, kind="stable")
    return Problem(name, kind, np.ascontiguousarray(features[order]), labels[order])


def read_libsvm(path: Path, dimension: int) -> tuple[Array, Array]:
    """Features (N, dimension) and labels of a LIBSVM text file, plain or ``.xz``; indices begin at 1."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        lines = [fields for line in file if (fields := line.split("#")[0].split())]
    features, labels = np.zeros((len(lines), dimension)), np.empty(len(lines))
    for row, fields in enumerate(lines):
        labels[row] = float(fields[0])
        for entry in fields[1:]:
            column, _, value = entry.partition(":")
            if not 1 <= int(column) <= dimension:
                raise ValueError(f"{path.name}, line {row + 1}: index {column} outside 1..{dimension}")
            features[row, int(column) - 1] = float(value)
    return features, labels


def locate(folder: Path, name: str) -> Path | None:
    """The file of a LIBSVM set in ``folder``, if it is there."""
    return next((p for p in (folder / name, folder / f"{name}.xz", folder / f"{name}.txt") if p.is_file()), None)


def load(name: str, folder: Path | None = None) -> Problem:
    """A problem by name; LIBSVM sets are read from ``folder``."""
    if name in EMBEDDED:
        from sklearn import datasets

        features, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
        return _prepare(name, EMBEDDED[name], np.asarray(features, np.float64), np.asarray(labels, np.float64))
    kind, dimension = LIBSVM[name]
    path = locate(folder, name) if folder is not None else None
    if path is None:
        raise FileNotFoundError(f"{name} is not in {folder}: download it from the LIBSVM page, plain or .xz")
    return _prepare(name, kind, *read_libsvm(path, dimension))


def available(folder: Path | None) -> Iterator[str]:
    """Names of the problems that can be loaded."""
    yield from EMBEDDED
    if folder is not None:
        yield from (name for name in LIBSVM if locate(folder, name) is not None)
