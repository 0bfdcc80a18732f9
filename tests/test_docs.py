"""Checks the pages of the documentation: their links, commands, names and versions.

The pages are README.md, CONTRIBUTING.md, CHANGELOG.md and those in docs/.
"""

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
TEXT_BY_PAGE = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
FOLDED_SECTION = re.compile(r"<details>.*?</details>", re.DOTALL)  # a reader sees its text only after a click
CODE_BLOCK = re.compile(r"```.*?```", re.DOTALL)


def make_anchor(heading):
    """Returns the anchor that GitHub gives to a heading, such as "set-up-and-check" for "Set up and check"."""
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_existing_files_and_headings(page):
    """Each link of a page, unless it leads to the web, has an existing file and an existing heading as its target.

    A link in Markdown is "[text](FILE#ANCHOR)". Without a FILE, the link leads to a heading of the same page.
    """
    page_path = ROOT / page
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXT_BY_PAGE[page]):
        if link.startswith("http"):
            continue
        file_name, _, anchor = link.partition("#")
        target = page_path.parent / file_name if file_name else page_path
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [make_anchor(heading) for heading in headings]
            assert anchor in anchors, link


def test_files_that_pages_name_exist():
    """Each path in a page that begins with a folder of this repository, such as recipes/text.py, exists."""
    folders = "recipes|scripts|benchmarks|tests|pages|configs|results"
    # A path stands after a space, a bracket or a quotation mark, and may begin with ./ or ../, which is dropped.
    path_in_text = re.compile(rf"(?:^|[\s`(\"'])(?:\.\.?/)?((?:{folders})/[\w./-]+)")
    for page in PAGES:
        if page == "docs/fairseq-tests.md":  # its files are in fairseq's repository
            continue
        for path in path_in_text.findall(TEXT_BY_PAGE[page]):
            path_without_full_stop = path.rstrip(".")  # a full stop may end the sentence
            assert (ROOT / path_without_full_stop).exists(), f"{page}: {path}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/add-a-function.md"])
def test_names_that_pages_explain_exist(page):
    """Each word in backticks is a name that occurs in the code.

    Code blocks are left out, since their names may be made up.
    """
    files = [*ROOT.glob("*/*.py"), *ROOT.glob("*/*/*.py"), *ROOT.glob("recipes/*.*"), *ROOT.glob("tests/*.yaml")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    text_without_code_blocks = CODE_BLOCK.sub("", TEXT_BY_PAGE[page])
    for word in re.findall(r"`(\w+)`", text_without_code_blocks):
        assert re.search(rf"\b{word}\b", code), word


@pytest.mark.parametrize("script", ["prepare", "train", "evaluate", "translate", "reproduce"])
def test_commands_that_pages_show_have_valid_options(script):
    """The options of each SCRIPT.sh command in a page are options that ``SCRIPT.sh --help`` lists.

    Folded sections are left out: they show commands as they were at an earlier commit.
    """
    argv = [sys.executable, "scripts/recipe.py", script, "--help"]
    process = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    valid_options = set(re.findall(r"--[a-z-]+", process.stdout))
    assert valid_options, process.stderr
    # A command ends where its line or its backticks end, or before one of the following: flags of fairseq-train, which
    # follow " -- "; a comment, which follows " #"; a closing bracket; and the next command, which follows "; ".
    end_of_command = re.compile(r" -- | #|\)|; ")
    option_after_a_space = re.compile(r"(?<!\S)--[a-z-]+")
    for page in PAGES:
        text = FOLDED_SECTION.sub("", TEXT_BY_PAGE[page])
        text = text.replace("\\\n", "")  # joins a line that ends with a backslash with the next one
        for rest_of_line in re.findall(rf"{script}\.sh ([^`\n]*)", text):
            arguments = end_of_command.split(rest_of_line)[0]
            options = set(option_after_a_space.findall(arguments))
            assert options <= valid_options, f"{page}: {script}.sh {arguments}"


def test_tables_that_pages_reproduce_exist():
    """Each TABLE in a command ``reproduce.sh TABLE`` is one of the tables of recipes/tables.yaml.

    Folded sections are left out, as in the test above.
    """
    # A name with capitals or hyphens is no name of a table: "reproduce.sh TABLE", for example, is a placeholder.
    table_in_command = re.compile(r"reproduce\.sh ([a-z_0-9]+)(?![\w-])")
    for page in PAGES:
        text = FOLDED_SECTION.sub("", TEXT_BY_PAGE[page])
        for table in table_in_command.findall(text):
            assert table in TABLES, f"{page}: reproduce.sh {table}"


def test_every_page_is_listed_in_the_readme():
    """README.md has a link to every other page."""
    other_pages = [page for page in PAGES if page != "README.md"]
    for page in other_pages:
        assert f"({page})" in TEXT_BY_PAGE["README.md"], page


def test_every_repair_is_listed():
    """The table of docs/fairseq-bugs.md has a row for each workaround, which begins with the workaround's name."""
    for name in REPAIRS:
        assert f"|`{name}`|" in TEXT_BY_PAGE["docs/fairseq-bugs.md"], name


def test_the_citation_has_the_version_of_the_package():
    """The file CITATION.cff has the version number of fairseq_synth/__init__.py."""
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {fairseq_synth.__version__}\n" in citation


def test_the_page_on_setting_up_names_the_default_function():
    """The row on --encoder-synthesizer in docs/setup.md names the default value of this flag and of the decoder's flag.

    The default is that of a model whose architecture sets no function, as in a program in Python.
    """
    lines = TEXT_BY_PAGE["docs/setup.md"].splitlines()
    row = next(line for line in lines if line.startswith("| `--encoder-synthesizer`"))
    for stack in ("encoder", "decoder"):
        default = stack_flag(stack).field.default
        assert f"otherwise `{default}`" in row
