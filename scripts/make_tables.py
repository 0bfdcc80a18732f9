"""Renders what follows from results/ and the recipes: tables of README.md and docs/, pictures of docs/.

    python scripts/make_tables.py [--check]

--check changes nothing and fails when a file is not what the results and the recipes say.
"""

import argparse
import logging
import re
import sys
from functools import partial
from pathlib import Path
from typing import Callable, Dict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes import analysis, choice, pictures, render  # noqa: E402
from recipes.command import UserError  # noqa: E402
from recipes.tables import TABLES  # noqa: E402

BLOCKS: Dict[str, Callable[[], str]] = {  # of pages, but those that are named after a table
    "README.md: multi30k": lambda: render.results("multi30k_cpu", short=True),
    "README.md: learned R": analysis.readme,
    "README.md: steps": lambda: render.steps_a_second("denoising_cpu"),
    "docs/which-one.md: advice": choice.advice,
    "docs/which-one.md: quality": choice.quality,
    "docs/which-one.md: cost": choice.cost,
    "docs/multi30k.md: multi30k": lambda: render.results("multi30k_cpu", "multi30k"),
    "docs/multi30k.md: validation loss": lambda: render.validation_loss("multi30k_cpu", "multi30k"),
    "docs/analysis.md: heads": analysis.table,
    "docs/analysis.md: alpha": lambda: render.alpha("multi30k_cpu"),
    "docs/analysis.md: tiled": lambda: render.results("multi30k_tiled"),
    "docs/analysis.md: lengths": lambda: analysis.lengths("multi30k_tiled"),
    "docs/performance.md: speed": lambda: render.speed(render.SPEED),
    "docs/performance.md: speed on a GPU": lambda: render.speed(render.SPEED_GPU),
    "docs/gpu-kernels.md: speed with the kernels": lambda: render.speed(render.SPEED_KERNELS),
    "docs/summaries.md: long sources": lambda: render.speed(render.SPEED_LONG),
    "docs/fairseq-bugs.md: repairs": render.repairs,
}


def block(page: str, found: "re.Match[str]") -> str:
    """A block as it should be; a table is followed by its picture."""
    start, name = found.groups()
    if f"{page}: {name}" in BLOCKS:
        return start + BLOCKS[f"{page}: {name}"]()
    if name not in TABLES:
        raise UserError(f"{page}: '<!-- results: {name} -->' names no table, and no block of scripts/make_tables.py")
    return start + render.results(name) + render.picture(name, "")


def rendered() -> Dict[Path, str]:
    """The pages with every block `<!-- results: NAME --> … <!-- end -->` filled."""
    found = {}
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        if text.count("<!-- results: ") != text.count("<!-- end -->"):
            raise UserError(f"{page}: not every '<!-- results: NAME -->' has its '<!-- end -->'")
        found[path] = re.sub(r"(<!-- results: (.*) -->\n)(?:.*\n)*?(?=<!-- end -->)", partial(block, page), text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    logging.disable(logging.INFO)  # Hydra's and matplotlib's
    check = parser.parse_args().check
    stale = []
    for path, text in rendered().items():
        if path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not check:
                path.write_text(text, encoding="utf-8")
    stale += pictures.render(check)
    if check and stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"error: not what results/ and the recipes say: {names}; run python scripts/make_tables.py")
    print(*(f"wrote {path}" for path in stale), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        sys.exit(f"error: {package} is not installed here; run source .venv/bin/activate")
