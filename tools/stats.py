"""Print the size and the structure of the project: `make stats`.

Lines per folder, functions per 1,000 lines, product modules with exactly one importer, the first import cycle.
Generated code (evaluator/pb) does not count.
"""

import ast
import subprocess
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PRODUCT = ("evaluator", "export", "training")


def main() -> None:
    """Print the statistics."""
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    files = [Path(name) for name in listed if not name.startswith("evaluator/pb/") and not Path(name).is_symlink()]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    rooms: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for file in files:
        for room in {file.parts[0], "/".join(file.parts[:2]) if len(file.parts) > 2 else file.parts[0]}:
            rooms[room] += lines[file]
            functions[room] += sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(trees[file]))
    for room in sorted(rooms):
        print(f"{room:28} {rooms[room]:7,} lines {1000 * functions[room] / rooms[room]:5.0f} functions per 1,000 lines")
    own = [file for file in files if file.parts[0] in PRODUCT]
    total = sum(lines[file] for file in own)
    inside = sum(functions[room] for room in PRODUCT)
    print(f"product: {total:,} lines in {len(own)} modules, {1000 * inside / total:.0f} functions per 1,000 lines")
    names = {file: "prelunet." + ".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in own}
    imports = {name: _imports(trees[file], {*names.values()}) - {name} for file, name in names.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    for module, imported in imports.items():
        for name in imported:
            importers[name].add(module)
    alone = [name for name, by in importers.items() if len(by) == 1]
    print(f"modules with exactly one importer: {len(alone)}")
    try:
        TopologicalSorter(imports).prepare()
        print("import cycles: none")
    except CycleError as error:
        print("import cycle: " + " <- ".join(error.args[1]))


def _imports(tree: ast.Module, modules: set[str]) -> set[str]:
    """Return the project modules that a module imports, at any level."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in modules else node.module)
    return found & modules


if __name__ == "__main__":
    main()
