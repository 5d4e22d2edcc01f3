"""A hook of mkdocs: pages made from the committed results of benchmarks and experiments, and roles in docstrings as links read.

Nothing is computed here: a table on the website is the file in the repository.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|obj):<code>(~?)([\w.]+)(?:\(\))?</code>")


def _title(folder: Path) -> tuple[str, str]:
    """The heading and the first paragraph of an experiment's own page."""
    lines = (folder / "README.md").read_text(encoding="utf-8").split("\n\n")
    return lines[0].lstrip("# ").strip(), lines[1].strip() if len(lines) > 1 else ""


def _section(path: Path, level: str, images: list[Path]) -> str:
    """One file of results, with the figure that belongs to it."""
    shown = path.read_text(encoding="utf-8").strip()
    shown = re.sub(r"^#+ (?=\S)", f"{level}# ", shown, flags=re.MULTILINE)
    figure = path.with_suffix(".png")
    if figure.exists():
        images.append(figure)
        shown += f"\n\n![{path.stem.replace('-', ' ').replace('_', ' ')}](images/{figure.parent.parent.name}-{figure.name})"
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


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and their figures."""
    images: list[Path] = []
    for name, page in (("benchmarks", _benchmarks(images)), ("experiments", _experiments(images))):
        files.append(File.generated(config, f"results/{name}.md", content=page))
    for image in images:
        files.append(File.generated(config, f"results/images/{image.parent.parent.name}-{image.name}", abs_src_path=str(image)))
    return files


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Docstrings name functions by roles, which Markdown does not know."""
    return ROLE.sub(lambda m: f"<code>{m[2].rsplit('.', 1)[-1] if m[1] else m[2]}</code>", html)


class Examples(griffe.Extension):
    """Examples and tables of docstrings as code: to Markdown a prompt is a quotation."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for everything that has a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring with fences around its examples and its tables."""
    blocks = re.split(r"\n{2,}", text)
    kinds = ["python" if b.lstrip().startswith(">>>") else "text" if re.match(r"\s*={4,} ", b) else "" for b in blocks]
    return "\n\n".join(f"```{kind}\n{inspect.cleandoc(b)}\n```" if kind else b for b, kind in zip(blocks, kinds))
