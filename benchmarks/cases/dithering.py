"""Sparse Dithering with its entropy coder, from float32 to bytes and back."""

from __future__ import annotations

import functools

from torch import Tensor

from benchmarks.cases.compressors import threads_work, work_of
from benchmarks.cases.inputs import gaussian
from benchmarks.registry import Body, Versus, Work, benchmark
from tersegrad import bench

NU, ALPHA = "sparse_dithering(nu=0.1)", "sparse_dithering(alpha=0.1)"


@functools.lru_cache(maxsize=1)
def student(numel: int) -> Tensor:
    """Student-t samples with three degrees of freedom: a tail that has to be escaped."""
    return bench.draw("student_t", numel)


for isa in ("avx512", "avx2"):
    best = isa == "avx512"

    @benchmark(f"sparse dithering nu=0.1/{isa}", isa=isa, targets={"encode": 0.5, "decode": 0.7} if best else {})
    def nearest(numel: int) -> Work:
        return work_of(NU, gaussian(numel))

    @benchmark(f"sparse dithering nu=0.1, Student-t(3)/{isa}", isa=isa, targets={"encode": 0.4} if best else {})
    def heavy_tails(numel: int) -> Work:
        return work_of(NU, student(numel))

    @benchmark(f"sparse dithering nu=0.1, rdo, Student-t(3)/{isa}", isa=isa)
    def chosen_levels(numel: int) -> Work:
        return work_of("sparse_dithering(nu=0.1, rdo=true)", student(numel))

    @benchmark(f"sparse dithering alpha=0.1, rdo, Student-t(3)/{isa}", isa=isa)
    def chosen_levels_to_error(numel: int) -> Work:
        return work_of("sparse_dithering(alpha=0.1, rdo=true)", student(numel))

    @benchmark(f"random sparse dithering omega=0.1/{isa}", isa=isa)
    def random(numel: int) -> Work:
        return work_of("random_sparse_dithering(omega=0.1)", gaussian(numel))


@benchmark(
    "sparse dithering/target error against nu",
    targets={"alpha=0.1 over nu=0.1": 1 / 1.4},
    versus={"alpha=0.1 over nu=0.1": Versus(fast="alpha=0.1", slow="nu=0.1")},
)
def target_error(numel: int) -> Work:
    works = {"nu=0.1": work_of(NU, gaussian(numel)), "alpha=0.1": work_of(ALPHA, gaussian(numel))}
    bodies: dict[str, Body] = {name: work.bodies["encode"] for name, work in works.items()}

    def verify() -> None:
        for work in works.values():
            work.verify()

    return Work(bodies, 4 * numel, verify)


for text, part in ((NU, "encode"), (NU, "decode")):

    @benchmark(
        f"two threads/{text} {part}, 64 Mi",
        threads=2,
        targets={"speed-up": 1.5},
        versus={"speed-up": Versus(fast="two threads", slow="one thread")},
    )
    def two_threads(numel: int, text: str = text, part: str = part) -> Work:
        return threads_work(text, part, gaussian(numel))


for numel in (10, 1000, 64 << 10):

    @benchmark(f"sparse dithering nu=0.1/{numel} coordinates", numel=numel, shrinks=False)
    def short(numel: int) -> Work:
        return work_of(NU, gaussian(numel))
