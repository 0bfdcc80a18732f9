"""Which file imports which: no circle in any package, and the files of recipes/ in one line."""

import ast

from helpers import ROOT

PACKAGES = ("recipes", "pages", "benchmarks", "fairseq_synth")
# The files of recipes/ in the order in which text passes through them. Each imports only files before it.
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
    """Returns all modules of the packages, as {dotted name: path}."""
    modules = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            *folders, name = path.relative_to(ROOT).with_suffix("").parts
            parts = folders if name == "__init__" else [*folders, name]
            modules[".".join(parts)] = path
    return modules


def read_imports(name, path, modules):
    """Returns the names of the `modules` that a module imports, at its top or later, but not for type checking."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            imported.update(read_import_from(node, package, modules))
    return (imported & set(modules)) - {name}


def read_import_from(node, package, modules):
    """Returns the modules that ``from X import Y, Z`` imports: X.Y where this is a module, else X.

    Args:
        node: the statement in Python's syntax tree. It has the number of dots before X as `level`.
        package: the package of the module that has the statement. In the package p.q, ``from .a import b`` imports from
            p.q.a, and ``from ..a import b`` from p.a.
        modules: the dotted names of all modules.
    """
    base = node.module or ""  # is missing in ``from . import b``
    if node.level > 0:
        folders = package.split(".")
        num_folders = len(folders) - (node.level - 1)  # one dot is the package itself
        parts = folders[:num_folders]
        if base:
            parts.append(base)
        base = ".".join(parts)
    imported = set()
    for alias in node.names:
        full_name = f"{base}.{alias.name}"
        imported.add(full_name if full_name in modules else base)
    return imported


def find_circle(graph):
    """Returns a way [a, b, ..., a] through a graph {name: names it imports}, or [] if there is none."""
    finished = set()

    def visit(name, way):
        if name in way:
            return [*way[way.index(name) :], name]
        if name in finished:
            return []
        for imported in sorted(graph[name]):
            circle = visit(imported, [*way, name])
            if circle:
                return circle
        finished.add(name)
        return []

    for name in sorted(graph):
        circle = visit(name, [])
        if circle:
            return circle
    return []


def read_graph():
    """Returns {module: the modules that it imports} of all packages."""
    modules = list_modules()
    return {name: read_imports(name, path, modules) for name, path in modules.items()}


def test_no_file_imports_itself_by_others():
    graph = read_graph()
    assert len(graph) > 40 and "recipes.steps" in graph["recipes.catalog"]
    assert find_circle({"a": {"b"}, "b": {"a"}}) == ["a", "b", "a"]
    assert find_circle(graph) == []


def test_packages_import_only_what_is_below_them():
    """fairseq_synth imports none of the other packages, and recipes only fairseq_synth."""
    allowed = {"fairseq_synth": {"fairseq_synth"}, "recipes": {"recipes", "fairseq_synth"}}
    for name, imported in read_graph().items():
        package = name.split(".")[0]
        if package in allowed:
            assert {other.split(".")[0] for other in imported} <= allowed[package], name


def test_each_file_of_recipes_imports_only_files_before_it():
    assert {path.stem for path in (ROOT / "recipes").glob("*.py")} == {*RECIPES_ORDER, "__init__"}
    graph = read_graph()
    for position, name in enumerate(RECIPES_ORDER):
        before = {f"recipes.{other}" for other in RECIPES_ORDER[:position]} | {"recipes"}
        imported = {other for other in graph[f"recipes.{name}"] if other.startswith("recipes")}
        assert imported <= before, name
