"""What Viterbi's algorithm chooses for a vector, by CUDA kernels: for its numbers, and once more where segments have scale classes."""

from __future__ import annotations

from torch import Tensor

from tersegrad.kernels.cuda import classes, scratch
from tersegrad.kernels.cuda.dither import RESULTS, SHARE, Draws, Step
from tersegrad.kernels.cuda.loader import aside, join, launch
from tersegrad.kernels.reference.classes import CLASSES
from tersegrad.kernels.reference.dither import USUAL_CHUNK
from tersegrad.kernels.reference.rans import SEGMENT, pieces
from tersegrad.kernels.reference.rounding import CHUNK
from tersegrad.kernels.reference.trellis import RUN

ENCODE, CLASSED = "trellis_encode.cu", "trellis_classes.cu"
# As in trellis.cuh and trellis_encode.cu.
KNOWN, PLACES, TABLES = 5, 17, 8
THREADS = 256
# Decisions of more states than this do not fit into a multiprocessor's memory.
NEAR_STATES = 16


class Chosen:
    """The integers of a vector, on the device: what Viterbi's algorithm chose, and what is known of its segments and their classes."""

    def __init__(
        self,
        x: Tensor,
        step: Step,
        states: int,
        chunk: int,
        draws: Draws,
        regions: classes.Regions,
        classed: bool,
    ) -> None:
        n, device, drawn = x.numel(), x.device, draws[0]
        self.n, self.chunk, self.segments, self.parts = n, chunk, len(pieces(n, SEGMENT)), -(-n // CHUNK)
        self.run, self.regions, self.classed, self.drawn = min(RUN, chunk or USUAL_CHUNK), regions, classed, drawn
        # What is counted of classes: by levels, of coordinates close to zero, and, with dither, of symbols.
        searched: list[int] = []
        if classed:
            searched = [*classes.summed(self.regions, self.segments), 4 * CLASSES * self.segments]
            searched += [4 * CLASSES * TABLES * 128 * self.segments] * drawn
        self.result, (_, self.known, *self.summed) = scratch.kept(device, 8 * RESULTS, 4 * KNOWN * self.segments, *searched)
        # Bytes are read sixteen at a time.
        self.memory, places = scratch.empty(
            device, n + 15, n + 15 if drawn else 0, n + 15 if classed else 0, *[8 * self.parts] * 7,
            8 * PLACES * self.segments, 8 * classes.PLACES_OF_SEGMENT * self.segments, 16 * self.segments, 4 * CLASSES * self.segments,
        )  # fmt: skip
        self.bytes, self.contexts, levels, *self.products = places[:10]
        self.described, self.scalars, self.sums, self.info = places[10:]
        self.step, self.given = step, (x, n, self.run, *step, *draws)
        self.states, self.classes, self.levels = states, 0, levels if classed else 0
        warps = 2 * -(-n // (1 << self.run))
        self.kept, (self.decisions,) = scratch.empty(
            device, warps * (1 << self.run) * states // 16 if states > NEAR_STATES else 0
        )
        self._go_through(self.levels)
        launch(
            ENCODE, "trellis_kinds", self.segments, 32,
            n, self.run, step[1], drawn, chunk or USUAL_CHUNK, self.known, self.described, self.scalars,
        )  # fmt: skip

    def _go_through(self, levels: int) -> None:
        """Viterbi's algorithm, for all segments or, once there are classes, for those that have some."""
        launch(
            f"trellis_viterbi_{self.states}.cu", f"trellis_viterbi_{self.states}", 2 * -(-self.n // (1 << self.run)), 32,
            *self.given, self.decisions, self.bytes, self.contexts, levels, self.classes, self.info, self.scalars, self.known,
        )  # fmt: skip

    def measure(self) -> None:
        """Norms, scales and errors of segments; with classes only the norms count."""
        launch(ENCODE, "trellis_sums", -(-self.parts // 16), 512, *self.given, self.bytes, *self.products[:3])
        launch(
            ENCODE, "trellis_fit", self.segments, 128,
            self.n, *self.step, self.drawn, *self.products[:3], self.known, self.described, self.sums,
        )  # fmt: skip

    def search(self) -> None:
        """Classes for the segments that gain from them; without dither, how many of their coordinates are close to zero."""
        self.found = classes.search(self.regions, self.n, self.chunk, self.summed[:3], self.levels, self.scalars, self.result)
        if not self.drawn:
            self.classes = self.found.classes
            launch(
                CLASSED, "trellis_near", self.segments * SHARE, THREADS,
                self.given[0], self.n, SHARE, *self.step, self.classes, self.scalars, self.summed[3],
            )  # fmt: skip

    def keep_still(self) -> None:
        """Without dither, choose the classes that are still. From here on it is known which segments have classes."""
        counts, tops, _, near = self.summed
        launch(
            CLASSED, "trellis_still", self.segments, 32,
            self.n, near, counts, tops, self.scalars, self.described, self.info, self.known,
        )  # fmt: skip

    def choose_anew(self) -> None:
        """The integers of segments with classes: coordinates of still classes leave the trellises."""
        self._go_through(0)
        with aside():
            launch(
                CLASSED, "trellis_class_sums", -(-self.parts // 16), 512,
                *self.given[:3], *self.step, self.bytes, self.classes, self.info, self.scalars, *self.products[3:],
            )  # fmt: skip

    def fit_classes(self) -> None:
        """Scales and errors of segments with classes, once all is measured."""
        launch(
            CLASSED, "trellis_class_fit", self.segments, 128,
            self.n, *self.products[3:], self.scalars, self.described, self.sums,
        )  # fmt: skip

    def find_errors(self) -> None:
        """Without dither, norms and errors of all segments."""
        with aside():
            self.measure()
        if self.classed:
            self.search()
            self.keep_still()
            self.choose_anew()
        join()
        if self.classed:
            self.fit_classes()
