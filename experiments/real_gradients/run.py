"""Bits that our compressors take on gradients of small networks, with and without scale classes, beside general-purpose compressors.

    python -m experiments.real_gradients.run                                # digits and the pages of this repository
    python -m experiments.real_gradients.run --images FOLDER --text FILE    # MNIST or CIFAR-10, another text
    python -m experiments.real_gradients.run --quick                        # one error, few steps, into out/

The first table has a row per error: Sparse Dithering with one table, with classes, with levels that were chosen by their bits too
(``rdo=true``), and with signs (``aligned``), the entropy of its levels and what xz, zstd and blosc2 make of them; then trellis codes,
which have classes too, at the same error, likewise with bits and with signs; last ``fewest_bits``, which tries all of it. xz is in the
standard library; zstd and blosc2 have columns where they can be imported.
The second table has compressors whose error follows from their form: bits and error of each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import lzma
import math
import platform
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from experiments.real_gradients.networks import Gradient, gradients
from tersegrad import kernels
from tersegrad.compressors.sparse_dithering import encode_to_error
from tersegrad.core.protocol import Context
from tersegrad.recipes import parse

RESULTS = Path(__file__).parent / "results"
NETWORKS = ("transformer", "lstm", "resnet", "cnn", "mlp")
# Of the first table, beside the bits without classes.
SAVING = ("with classes", "trellis", "aligned trellis", "fewest bits")
# Of the second table.
FORMS = (
    "sign",
    "rotated(sign)",
    "int4",
    "qsgd(bits=4, norm=max)",
    "qsgd(bits=4, norm=max, coder=rans)",
    "natural(coder=rans)",
    "natural_dithering(coder=rans)",
    "subtractive_dithering(omega=0.25)",
    "dithered_trellis(omega=0.25)",
    "subtractive_dithering(omega=8)",
    "subtractive_dithering(omega=8, scale=global)",
    "dithered_trellis(omega=8)",
)


def others() -> dict[str, Callable[[bytes], int]]:
    """Lengths that general-purpose compressors reach, by name."""
    found: dict[str, Callable[[bytes], int]] = {"xz": lambda raw: len(lzma.compress(raw, preset=6))}
    try:
        zstandard = importlib.import_module("zstandard")
        found["zstd -1"] = lambda raw: len(zstandard.ZstdCompressor(level=1).compress(raw))
        found["zstd -19"] = lambda raw: len(zstandard.ZstdCompressor(level=19).compress(raw))
    except ImportError:
        pass
    try:
        blosc2 = importlib.import_module("blosc2")
        found["blosc2"] = lambda raw: len(
            blosc2.compress2(raw, codec=blosc2.Codec.ZSTD, clevel=9, typesize=1, filters=[blosc2.Filter.BITSHUFFLE])
        )
    except ImportError:
        pass
    return found


def entropy(levels: Tensor) -> float:
    """Bits per level, all levels of the vector together."""
    counts = torch.unique(levels, return_counts=True)[1].double()
    share = counts / counts.sum()
    return float(-(share * share.log2()).sum())


def measure(gradient: Gradient, alpha: float) -> dict[str, float]:
    """Bits per coordinate of every coder."""
    x, d, spec = gradient.values, gradient.values.numel(), gradient.spec
    run = kernels.get(x.device)
    plain = encode_to_error(x, alpha, "auto", "auto", None)
    one = run.dither_decode(plain.data, torch.empty(d), None)
    compressor = parse(f"sparse_dithering(alpha={alpha})")
    message, _ = compressor.encode(x, spec, compressor.init(spec, x.device), Context())
    decoded = compressor.decode(message, spec, Context())
    if not torch.equal(decoded, one) or float((decoded.double() - x.double()).square().sum()) > alpha * plain.norm * (1 + 1e-9):
        raise AssertionError("the messages with and without classes do not hold the same values")
    # Each block of 2^16 has a scale; its levels are whole multiples of it.
    scales = torch.stack([b.abs()[b != 0].min() if bool((b != 0).any()) else torch.ones(()) for b in decoded.split(1 << 16)])
    levels = torch.cat([torch.round(b / s) for b, s in zip(decoded.split(1 << 16), scales)]).to(torch.int32)
    raw = levels.clamp(-127, 127).to(torch.int8).numpy().tobytes()
    row = {
        "without classes": 8 * plain.data.numel() / d,
        "with classes": 8 * int(message.nbytes) / d,
        "chosen levels": sent(f"sparse_dithering(alpha={alpha}, rdo=true)", gradient, alpha)[0],
        "aligned": sent(f"aligned(sparse_dithering(alpha={alpha}))", gradient, alpha)[0],
        "entropy": entropy(levels),
    }
    row |= {name: 8 * length(raw) / d for name, length in others().items()}
    trellis = f"trellis(alpha={alpha})"
    return row | {
        "trellis": sent(trellis, gradient, alpha)[0],
        "trellis by bits": sent(f"trellis(alpha={alpha}, rdo=true)", gradient, alpha)[0],
        "aligned trellis": sent(f"aligned({trellis})", gradient, alpha)[0],
        "fewest bits": sent(f"fewest_bits(alpha={alpha})", gradient, alpha)[0],
    }


def sent(text: str, gradient: Gradient, most: float = math.inf) -> tuple[float, float]:
    """Bits per coordinate of a message, and the error of what it decodes to, at ``most`` so much."""
    x, spec, c = gradient.values, gradient.spec, parse(text)
    message, _ = c.encode(x, spec, c.init(spec, x.device), Context(seed=1))
    error = float((c.decode(message, spec, Context(seed=1)).double() - x.double()).square().sum() / x.double().square().sum())
    if error > most * (1 + 1e-9):
        raise AssertionError(f"{text} errs by {error}")
    return 8 * int(message.nbytes) / x.numel(), error


def forms(rows: list[dict[str, object]]) -> str:
    """Markdown of the second table: bits, and the error in brackets."""
    lines = ["| network | step | " + " | ".join(f"`{text}`" for text in FORMS) + " |", "|---" * (len(FORMS) + 2) + "|"]
    for row in rows:
        pairs = [str(row[text]).strip("[]").split(", ") for text in FORMS]
        cells = " | ".join(f"{float(bits):.3f} ({float(error):.3g})" for bits, error in pairs)
        lines.append(f"| {row['network']} | {row['step']} | {cells} |")
    return "\n".join(lines) + "\n"


def table(rows: list[dict[str, object]]) -> str:
    """Markdown, with what classes, trellis codes, both with aligned signs, and everything together save of the bits without classes."""
    names = [n for n in rows[0] if n not in ("network", "step", "alpha")]
    heads = ["network", "step", "alpha", *names, *(f"{n}: saved" for n in SAVING)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        values = {n: float(str(row[n])) for n in names}
        cells = [f"{v:.4f}" if v < 0.1 else f"{v:.3f}" for v in values.values()]
        cells += [f"{100 * (1 - values[n] / values['without classes']):.0f} %" for n in SAVING]
        lines.append(f"| {row['network']} | {row['step']} | {row['alpha']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, measure, write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--images", default="digits", help="digits, or a folder with MNIST or CIFAR-10")
    parser.add_argument("--text", help="a file, plain or .xz")
    parser.add_argument("--quick", action="store_true", help="one error, few steps")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--name", default="real_gradients", help="of the files in results")
    options = parser.parse_args()
    steps, alphas = ((2, 20), (0.1,)) if options.quick else ((10, 80, 240), (0.25, 0.1, 0.03))
    folder = Path("out") if options.quick else RESULTS
    folder.mkdir(exist_ok=True)
    about = {"images": Path(options.images).name, "text": Path(options.text).name if options.text else "docs"}
    about |= {"torch": torch.__version__, "machine": platform.machine()}
    rows: list[dict[str, object]] = []
    more: list[dict[str, object]] = []
    for gradient in gradients(tuple(options.networks.split(",")), options.text, options.images, steps):
        for alpha in alphas:
            rows.append({"network": gradient.network, "step": gradient.step, "alpha": alpha} | measure(gradient, alpha))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
        more.append({"network": gradient.network, "step": gradient.step} | {text: list(sent(text, gradient)) for text in FORMS})
        # As far as it got: training takes minutes.
        (folder / f"{options.name}.json").write_text(
            json.dumps({"about": about, "rows": rows, "forms": more}, indent=1) + "\n", encoding="utf-8"
        )
        page = f"Bits per coordinate at equal error:\n\n{table(rows)}\nBits per coordinate (and relative squared error):\n\n{forms(more)}"
        (folder / f"{options.name}.md").write_text(page, encoding="utf-8")
    for name in SAVING:
        worst = max(float(str(r[name])) / float(str(r["without classes"])) for r in rows)
        print(f"{name}: the largest share of the bits without classes is {worst:.3f}")
    for name in others():
        worst = max(float(str(r["fewest bits"])) / float(str(r[name])) for r in rows)
        print(f"fewest bits: the largest share of what {name} makes of scalar levels is {worst:.3f}")


if __name__ == "__main__":
    main()
