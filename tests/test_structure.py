"""Checks which file imports which.

No file imports itself through other files. fairseq_synth and recipes/ do not import the packages above them, and the
files of recipes/ import each other in one direction only.
"""

import ast

from helpers import ROOT

PACKAGES = ("recipes", "pages", "benchmarks", "fairseq_synth")
# The files of recipes/ in the order in which text passes through them. Each file imports only files that are listed
# before it.
RECIPES_ORDER = [
    "steps",
    "logs",
    "languages",
    "catalog",
    "text",
    "talks",
    "pairs",
    "examples",
    "subwords",
    "metrics",
    "checks",
    "prepare",
    "provenance",
    "train",
    "score",
    "translate",
    "reproduce",
]


def list_modules():
    """Returns {dotted name: path} for all modules of the packages, such as {"recipes.text": ROOT/recipes/text.py}.

    The file __init__.py of a folder has the name of the folder.
    """
    modules = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            path_without_suffix = path.relative_to(ROOT).with_suffix("")
            *folders, file_name = path_without_suffix.parts
            parts = folders if file_name == "__init__" else [*folders, file_name]
            dotted_name = ".".join(parts)
            modules[dotted_name] = path
    return modules


def read_imports(name, path, modules):
    """Returns the dotted names of the modules that a module imports, at its top or within a function.

    Imports in ``if TYPE_CHECKING:`` do not count, as they are not run. Neither do modules outside of the packages.

    Args:
        name: the dotted name of the module.
        path: its file.
        modules: the dotted names of all modules of the packages.
    """
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    is_package = path.name == "__init__.py"
    package = name if is_package else name.rpartition(".")[0]
    imported_names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported_names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported_names.update(read_import_from(node, package, modules))
    return (imported_names & set(modules)) - {name}


def read_import_from(node, package, modules):
    """Returns the modules that ``from X import Y, Z`` imports: for each imported name X.Y if it is a module, else X.

    Args:
        node: the statement in Python's syntax tree. The attribute `level` is the number of dots before X.
        package: the package of the module that has the statement. In the package p.q, ``from .a import b`` imports from
            p.q.a, and ``from ..a import b`` from p.a.
        modules: the dotted names of all modules.
    """
    base = node.module or ""  # `node.module` is None in ``from . import b``
    is_relative = node.level > 0
    if is_relative:
        folders = package.split(".")
        num_folders = len(folders) - (node.level - 1)  # one dot stands for the package itself
        parts = folders[:num_folders]
        if base:
            parts.append(base)
        base = ".".join(parts)
    imported_names = set()
    for alias in node.names:
        full_name = f"{base}.{alias.name}"
        if full_name in modules:
            imported_names.add(full_name)
        else:  # the name is a function, class or constant of the module `base`
            imported_names.add(base)
    return imported_names


def find_cycle(graph):
    """Returns a cycle [a, b, ..., a] in a graph {name: the names that it imports}, or [] if there is none."""
    names_without_cycle = set()  # no cycle can be reached from these names

    def visit(name, path):
        """Returns a cycle that can be reached from a name, or [] if there is none.

        `path`: the names from which the search has come to this name. Each of them imports the next one.
        """
        if name in path:
            start_of_cycle = path.index(name)
            return [*path[start_of_cycle:], name]
        if name in names_without_cycle:
            return []
        for imported_name in sorted(graph[name]):
            cycle = visit(imported_name, [*path, name])
            if cycle:
                return cycle
        names_without_cycle.add(name)
        return []

    for name in sorted(graph):
        cycle = visit(name, path=[])
        if cycle:
            return cycle
    return []


def read_graph():
    """Returns {module: the modules that it imports} for all modules of the packages, by their dotted names."""
    modules = list_modules()
    return {name: read_imports(name, path, modules) for name, path in modules.items()}


def get_package(module):
    """Returns the package of a module: the first part of its dotted name."""
    return module.split(".")[0]


def test_no_file_imports_itself_by_others():
    """The imports of the packages have no cycle, in which a file imports another one that imports it again.

    The first assertions check the helpers of this test: they find modules, imports and cycles.
    """
    graph = read_graph()
    assert len(graph) > 40
    assert "recipes.steps" in graph["recipes.catalog"]
    assert find_cycle({"a": {"b"}, "b": {"a"}}) == ["a", "b", "a"]

    assert find_cycle(graph) == []


def test_packages_import_only_what_is_below_them():
    """fairseq_synth imports none of the other packages, and recipes only fairseq_synth."""
    allowed_packages = {
        "fairseq_synth": {"fairseq_synth"},
        "recipes": {"recipes", "fairseq_synth"},
    }
    for name, imported_names in read_graph().items():
        package = get_package(name)
        if package in allowed_packages:
            imported_packages = {get_package(imported_name) for imported_name in imported_names}
            assert imported_packages <= allowed_packages[package], name


def test_each_file_of_recipes_imports_only_files_before_it():
    """RECIPES_ORDER lists every file, and each file imports only files that are listed before it."""
    file_names = {path.stem for path in (ROOT / "recipes").glob("*.py")}
    assert file_names == {*RECIPES_ORDER, "__init__"}

    graph = read_graph()
    allowed_names = {"recipes"}  # the file __init__.py
    for name in RECIPES_ORDER:
        module = f"recipes.{name}"
        imported_names = {imported_name for imported_name in graph[module] if imported_name.startswith("recipes")}
        assert imported_names <= allowed_names, name
        allowed_names.add(module)
