"""Print the size and the structure of the project: `make stats`.

Code lines are those without blank lines, comments and docstrings. Generated code (evaluator/pb) does not count.
"""

import ast
import subprocess
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

PRODUCT = ("evaluator", "export", "training")
LONGEST = 10
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    """Print the statistics."""
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    files = [Path(name) for name in listed if not name.startswith("evaluator/pb/") and not Path(name).is_symlink()]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    code = {file: len(_code_lines(texts[file], trees[file])) for file in files}
    functions = {file: [node for node in ast.walk(trees[file]) if isinstance(node, Function)] for file in files}
    sums: dict[str, Counter[str]] = {}
    for file in files:
        in_product = ["product"] if file.parts[0] in PRODUCT else []
        for name in {file.parts[0], "/".join(file.parts[:2]) if len(file.parts) > 2 else file.parts[0], *in_product}:
            counts = {"all": len(texts[file].splitlines()), "code": code[file], "functions": len(functions[file])}
            sums.setdefault(name, Counter()).update({**counts, "modules": 1})
    print(f"{'':28} {'code lines':>10} {'all lines':>10} {'modules':>8} {'functions per 1,000 code lines':>31}")
    for name, one in sorted(sums.items()):
        rate = 1000 * one["functions"] / max(1, one["code"])
        print(f"{name:28} {one['code']:10,} {one['all']:10,} {one['modules']:8,} {rate:31.0f}")
    _print_imports()
    print(f"the {LONGEST} longest functions of the product, in code lines:")
    lengths = [
        (len(_code_lines(texts[file], trees[file]) & {*range(node.lineno, (node.end_lineno or 0) + 1)}), node, file)
        for file in files if file.parts[0] in PRODUCT for node in functions[file]
    ]  # fmt: skip
    for length, node, file in sorted(lengths, key=lambda one: -one[0])[:LONGEST]:
        print(f"{length:6} {node.name}, {file}:{node.lineno}")


def _code_lines(text: str, tree: ast.Module) -> set[int]:
    """Return the numbers of the lines with code."""
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip() and line.strip()[0] != "#"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def _print_imports() -> None:
    graph = grimp.build_graph("prelunet")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    alone = [module for module in graph.modules if len(graph.find_modules_that_directly_import(module)) == 1]
    print(f"modules with exactly one importer: {len([name for name in alone if '.pb.' not in name])}")
    try:
        TopologicalSorter(imports).prepare()
        print("import cycles: none")
    except CycleError as error:
        print("import cycle: " + " <- ".join(error.args[1]))


if __name__ == "__main__":
    main()
