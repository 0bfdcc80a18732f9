"""Which file imports which: no circle in any package, and the recipes in a line."""

import ast

from helpers import ROOT

PACKAGES = ("recipes", "pages", "benchmarks", "fairseq_synth")
# what text becomes on its way; each file imports only those before it
LINE = "steps languages catalog text pairs examples subwords metrics checks prepare".split()
LINE += "provenance train score translate reproduce".split()


def files():
    """{dotted name: its file}"""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            words = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


def imports(name, path, known):
    """The files that a file imports, also late ones; not those that are only there for the types."""
    tree, found = ast.parse(path.read_text()), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            inner = {f"{module}.{alias.name}" for alias in node.names}
            # a package's own names are in its __init__.py, which is not asked for the files beside it
            found |= (inner & known) | ({module} if inner - known else set())
    return (found & known) - {name}


def circle(graph):
    """A way from a file back to it, or an empty one."""
    done = set()

    def visit(name, way):
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph[name]):
            found = visit(other, [*way, name])
            if found:
                return found
        done.add(name)
        return []

    return next(filter(None, (visit(name, []) for name in sorted(graph))), [])


def test_no_file_imports_itself_by_others():
    known = files()
    graph = {name: imports(name, path, {*known}) for name, path in known.items()}
    assert len(graph) > 40 and "recipes.steps" in graph["recipes.catalog"] and circle({"a": {"b"}, "b": {"a"}})
    assert circle(graph) == []
    for name, others in graph.items():
        package, _, own = name.partition(".")
        outside = {other for other in others if other.split(".")[0] != package}
        if package == "recipes":
            assert all(other.startswith("fairseq_synth") for other in outside), name
            inside = {other.partition(".")[2] for other in others - outside} - {""}
            assert own not in LINE or {LINE.index(other) for other in inside} <= {*range(LINE.index(own))}, name
        elif package == "fairseq_synth":
            assert not outside, name
    assert {path.stem for path in (ROOT / "recipes").glob("*.py")} == {*LINE, "__init__"}
