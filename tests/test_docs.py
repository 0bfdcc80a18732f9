"""README.md and docs/: their links, commands, names, versions and the list of repairs."""

import re
import subprocess
import sys

import pytest

import fairseq_synth
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


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    """To files that exist, and within a page to its headings."""
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("http"):
            continue
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            assert heading in {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}, link


def test_files_that_pages_name_exist():
    """Scripts, modules, tests and folders, by their path from the root; but those of fairseq's repository."""
    folders = "recipes|scripts|benchmarks|tests|pages|configs|results"
    for name in {*PAGES} - {"docs/fairseq-tests.md"}:
        for path in re.findall(rf"(?:^|[\s`(\"'])(?:\.\.?/)?((?:{folders})/[\w./-]+)", TEXT[name]):
            assert (ROOT / path.rstrip(".")).exists() or path.startswith("results/TABLE"), f"{name}: {path}"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/add-a-function.md"])
def test_names_that_pages_explain_exist(name):
    """Classes, functions and keys of the code; in the examples a page's own are made up."""
    files = [*ROOT.glob("*/*.py"), *ROOT.glob("*/*/*.py"), *ROOT.glob("recipes/*.*"), *ROOT.glob("tests/*.yaml")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    text = re.sub(r"(?s)```.*?```", "", TEXT[name])
    for word in re.findall(r"`(\w+)`", text):
        assert re.search(rf"\b{word}\b", code), word


@pytest.mark.parametrize("script", ["prepare", "train", "evaluate", "translate", "reproduce"])
def test_commands_that_pages_show(script):
    """Their options are the script's, and their tables exist. Folded ones are what was run at an earlier commit."""
    argv = [sys.executable, "scripts/recipe.py", script, "--help"]
    said = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    options = set(re.findall(r"--[a-z-]+", said.stdout))
    assert options, said.stderr
    for name in PAGES:
        text = re.sub(r"(?s)<details>.*?</details>", "", TEXT[name]).replace("\\\n", "")
        for words in re.findall(rf"{script}\.sh ([^`\n]*)", text):
            own = re.split(r" -- | #|\)|; ", words)[0]
            assert set(re.findall(r"(?<!\S)--[a-z-]+", own)) <= options, f"{name}: {script}.sh {own}"
            table = own.split()[0] if script == "reproduce" else "TABLE"
            assert table in TABLES or not re.fullmatch(r"[a-z_0-9]+", table), f"{name}: {script}.sh {own}"


def test_every_page_is_listed_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert all(f"({page})" in readme for page in PAGES if page != "README.md")


def test_every_repair_is_listed():
    page = (ROOT / "docs" / "fairseq-bugs.md").read_text()
    assert all(f"|`{name}`|" in page for name in REPAIRS)


def test_one_version():
    assert f"\nversion: {fairseq_synth.__version__}\n" in (ROOT / "CITATION.cff").read_text()
