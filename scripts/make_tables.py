"""Renders what follows from results/ and the recipes: tables of README.md and docs/, pictures of docs/.

    python scripts/make_tables.py [--check]

--check changes nothing and fails when a file is not what the results and the recipes say.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Callable, Dict

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes import analysis, choice, pictures, render  # noqa: E402
from recipes.command import UserError  # noqa: E402

BLOCKS: Dict[str, Dict[str, Callable[[], str]]] = {  # page: {block: its contents}
    "README.md": {
        "multi30k": lambda: render.results("multi30k_cpu", short=True),
        "learned R": analysis.readme,
        "steps": lambda: render.steps_a_second("denoising_cpu"),
    },
    "docs/which-one.md": {"advice": choice.advice, "quality": choice.quality, "cost": choice.cost},
    "docs/multi30k.md": {
        "multi30k": lambda: render.results("multi30k_cpu", "multi30k"),
        "validation loss": lambda: render.validation_loss("multi30k_cpu"),
    },
    "docs/analysis.md": {
        "heads": analysis.table,
        "alpha": lambda: render.alpha("multi30k_cpu"),
        "tiled": lambda: render.results("multi30k_tiled"),
        "lengths": lambda: analysis.lengths("multi30k_tiled"),
    },
    "docs/wmt14.md": {"table2": lambda: render.results("table2")},
    "docs/performance.md": {
        "speed": lambda: render.speed(render.SPEED),
        "speed on a GPU": lambda: render.speed(render.SPEED_GPU),
    },
    "docs/fairseq-bugs.md": {"repairs": render.repairs},
}
for page, names in (  # a table and its picture
    ("docs/language-models.md", ("table2_lm", "ptb_cpu", "wikitext2_cpu")),
    ("docs/denoising.md", ("table4", "denoising_cpu")),
    ("docs/glue.md", ("glue", "superglue", "glue_cpu")),
    ("docs/summaries.md", ("cnndm", "personachat", "aeslc_cpu", "dailydialog_cpu")),
    ("docs/classification.md", ("table7", "agnews_cpu", "imdb_cpu")),
):
    BLOCKS[page] = {name: lambda name=name: render.results(name) + render.picture(name, "") for name in names}
BLOCKS["docs/summaries.md"]["long sources"] = lambda: render.speed(render.SPEED_LONG)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    logging.disable(logging.INFO)  # Hydra's and matplotlib's
    check = parser.parse_args().check
    files: Dict[Path, str] = {}
    for name, blocks in BLOCKS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        for block, contents in blocks.items():
            text = render.fill(name, text, block, contents())
        files[ROOT / name] = text
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in [] if check else stale:
        path.write_text(files[path], encoding="utf-8")
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
