"""README.md, CONTRIBUTING.md, CHANGELOG.md and docs/: their links, commands, names and versions."""

import re
import subprocess
import sys

import pytest

import fairseq_synth
from fairseq_synth.config import stack_flag
from fairseq_synth.host.repairs import REPAIRS
from recipes.catalog import TABLES
from recipes.steps import ROOT

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
]
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
# the sections of a page that are folded until a reader opens them
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)


def anchor(heading):
    """Returns the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_existing_files_and_headings(name):
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXT[name]):
        if link.startswith("http"):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [anchor(text) for text in headings], link


def test_files_that_pages_name_exist():
    folders = "recipes|scripts|benchmarks|tests|pages|configs|results"
    for name in PAGES:
        if name == "docs/fairseq-tests.md":  # its files are in fairseq's repository
            continue
        for path in re.findall(rf"(?:^|[\s`(\"'])(?:\.\.?/)?((?:{folders})/[\w./-]+)", TEXT[name]):
            is_placeholder = path.startswith("results/TABLE")
            assert is_placeholder or (ROOT / path.rstrip(".")).exists(), f"{name}: {path}"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/add-a-function.md"])
def test_names_that_pages_explain_exist(name):
    """Words in backticks are names of the code. Code blocks are left out, since their names may be made up."""
    files = [*ROOT.glob("*/*.py"), *ROOT.glob("*/*/*.py"), *ROOT.glob("recipes/*.*"), *ROOT.glob("tests/*.yaml")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    for word in re.findall(r"`(\w+)`", CODE_BLOCK.sub("", TEXT[name])):
        assert re.search(rf"\b{word}\b", code), word


@pytest.mark.parametrize("script", ["prepare", "train", "evaluate", "translate", "reproduce"])
def test_commands_that_pages_show_have_valid_options(script):
    """Folded sections are left out: they show commands as they were at an earlier commit."""
    argv = [sys.executable, "scripts/recipe.py", script, "--help"]
    process = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    valid_options = set(re.findall(r"--[a-z-]+", process.stdout))
    assert valid_options, process.stderr
    # A command ends where its line or its backticks end, or before this: flags of fairseq-train behind " -- ", a
    # comment, a bracket in which it stands, or the next command.
    end_of_command = re.compile(r" -- | #|\)|; ")
    option_behind_a_space = re.compile(r"(?<!\S)--[a-z-]+")
    for name in PAGES:
        text = FOLDED.sub("", TEXT[name])
        text = text.replace("\\\n", "")  # joins a line that ends with a backslash with the next one
        for rest_of_line in re.findall(rf"{script}\.sh ([^`\n]*)", text):
            arguments = end_of_command.split(rest_of_line)[0]
            options = set(option_behind_a_space.findall(arguments))
            assert options <= valid_options, f"{name}: {script}.sh {arguments}"


def test_tables_that_pages_reproduce_exist():
    for name in PAGES:
        for table in re.findall(r"reproduce\.sh ([a-z_0-9]+)(?![\w-])", FOLDED.sub("", TEXT[name])):
            assert table in TABLES, f"{name}: reproduce.sh {table}"


def test_every_page_is_listed_in_the_readme():
    for page in PAGES:
        assert page == "README.md" or f"({page})" in TEXT["README.md"], page


def test_every_repair_is_listed():
    for name in REPAIRS:
        assert f"|`{name}`|" in TEXT["docs/fairseq-bugs.md"], name


def test_the_citation_has_the_version_of_the_package():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fairseq_synth.__version__}\n" in citation


def test_the_page_on_setting_up_names_the_default_function():
    """The default is that of a model whose architecture sets no function, as in a program in Python."""
    for stack in ("encoder", "decoder"):
        default = stack_flag(stack).field.default
        row = next(line for line in TEXT["docs/setup.md"].splitlines() if line.startswith("| `--encoder-synthesizer`"))
        assert f"otherwise `{default}`" in row
