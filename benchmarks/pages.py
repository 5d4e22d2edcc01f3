"""The pages of the website: docs/, and pages made from the committed results of benchmarks and experiments.

    python -m benchmarks.pages build/docs      (make docs)

Nothing is computed here: a table on the website is the file in the repository.
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|obj):`(~?)([\w.]+)(?:\(\))?`")


def _title(folder: Path) -> tuple[str, str]:
    """The heading and the first paragraph of an experiment's own page."""
    lines = (folder / "README.md").read_text(encoding="utf-8").split("\n\n")
    return lines[0].lstrip("# ").strip(), lines[1].strip().replace("](../../docs/", "](../") if len(lines) > 1 else ""


def _section(path: Path, level: str, images: list[Path]) -> str:
    """One file of results, with the figures that it shows and the one of its own name."""

    def place(image: Path) -> str:
        images.append(image)
        return f"images/{image.parent.parent.name}-{image.name}"

    shown = path.read_text(encoding="utf-8").strip()
    shown = re.sub(r"^#+ (?=\S)", f"{level}# ", shown, flags=re.MULTILINE)
    shown = re.sub(r"\]\(([\w.-]+\.png)\)", lambda m: f"]({place(path.with_name(m[1]))})", shown)
    figure = path.with_suffix(".png")
    if figure.exists() and figure not in images:
        shown += f"\n\n![{path.stem.replace('-', ' ').replace('_', ' ')}]({place(figure)})"
    return f"{level} {path.stem.replace('_', ' ')}\n\n{shown}\n\n<small>{path.relative_to(ROOT)}</small>\n"


def _benchmarks(images: list[Path]) -> str:
    found = sorted((ROOT / "benchmarks" / "results").glob("*.md"), reverse=True)
    head = (
        "# Benchmarks\n\nSpeeds, rates and steps as they were measured, the newest first: each table is a file of "
        "`benchmarks/results`, whose `.json` has the numbers. `make bench` and `make cluster` make new ones.\n"
    )
    return "\n".join([head, *(_section(path, "##", images) for path in found)])


def _experiments(images: list[Path]) -> str:
    parts = [
        "# Experiments\n\nThe tables that the experiments wrote, as they are in the repository; [what they show](../experiments.md), and "
        "[the variance-based ones](../variance-experiments.md).\n"
    ]
    for folder in sorted(path.parent for path in (ROOT / "experiments").glob("*/README.md")):
        found = sorted((folder / "results").glob("*.md"))
        if found:
            title, words = _title(folder)
            parts += [f"## {title}\n\n{words}\n", *(_section(path, "###", images) for path in found)]
    return "\n".join(parts)


def linked(text: str) -> str:
    """A page of docs/ whose links to files of results lead to their places on the website."""
    text = re.sub(r"\]\(\.\./benchmarks/results/([\w.-]+)\.md\)", r"](results/benchmarks.md#\1)", text)
    text = re.sub(r"\]\(\.\./experiments/[\w/-]+\.md\)", "](results/experiments.md)", text)
    return re.sub(r"\]\(\.\./benchmarks/results/([\w.-]+\.png)\)", r"](results/images/benchmarks-\1)", text)


def write(folder: Path) -> None:
    """Write everything that the website is built of into a folder; what was there is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    for path in folder.glob("*.md"):
        path.write_text(linked(path.read_text(encoding="utf-8")), encoding="utf-8")
    images: list[Path] = []
    (folder / "results" / "images").mkdir(parents=True)
    for name, page in (("benchmarks", _benchmarks(images)), ("experiments", _experiments(images))):
        (folder / "results" / f"{name}.md").write_text(page, encoding="utf-8")
    for image in images:
        shutil.copy(image, folder / "results" / "images" / f"{image.parent.parent.name}-{image.name}")


class Examples(griffe.Extension):
    """Docstrings as Markdown: examples and tables are code, since to Markdown a prompt is a quotation; roles are names."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(named(obj.docstring.value))


def named(text: str) -> str:
    """A docstring with plain names instead of roles, which Markdown does not know."""
    return ROLE.sub(lambda m: f"`{m[2].rsplit('.', 1)[-1] if m[1] else m[2]}`", text)


def fenced(text: str) -> str:
    """A docstring with fences around its examples and its tables."""
    blocks = re.split(r"\n{2,}", text)
    kinds = ["python" if b.lstrip().startswith(">>>") else "text" if re.match(r"\s*={4,} ", b) else "" for b in blocks]
    return "\n\n".join(f"```{kind}\n{inspect.cleandoc(b)}\n```" if kind else b for b, kind in zip(blocks, kinds))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
