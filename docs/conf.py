"""Sphinx's settings for the site: `make docs` builds it from these pages, docstrings and the options of all verbs."""

import re
from importlib.metadata import version as installed_version
from pathlib import Path

import typer
from docutils import nodes
from latex2mathml.converter import convert as latex_to_mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

from prelunet.evaluator.cli import VERBS, load_verb
from prelunet.evaluator.errors import ERROR_STATUSES, PreluNetError

DOCS = Path(__file__).parent
GENERATED = DOCS / "_generated"  # not committed: options.md and api.md

project = "prelunet"
version = release = installed_version("prelunet")
project_copyright = "the authors of prelunet"
html_title = f"prelunet {version}"
html_theme = "furo"
html_theme_options = {"source_edit_link": "", "top_of_page_buttons": []}
html_show_sourcelink = False
html_math_renderer = "mathml"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
smartquotes = False  # it would make dashes of the two hyphens of options
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 4
autodoc_typehints = "signature"
autodoc_member_order = "bysource"

SECTIONS = {
    "Evaluate": (
        "quickstart", "python", "evaluation", "protocols", "datasets", "statistics", "reports", "many-machines",
    ),
    "Serve": ("serving", "client", "open-inference-protocol", "security", "operations", "torchserve"),
    "Train": ("training", "importing", "adopting", "finding", "paper", "claims"),
    "Look up": ("performance", "formats", "errors", "_generated/options", "_generated/api", "glossary"),
}  # fmt: skip

API = """# Python API

```{eval-rst}
.. autofunction:: prelunet.load

.. autoclass:: prelunet.Net
   :members:

.. autoclass:: prelunet.Classified
   :members:

.. autoclass:: prelunet.Answers

.. autoclass:: prelunet.Prediction

.. autoclass:: prelunet.Evaluation
   :members:

.. autofunction:: prelunet.compare

.. autoclass:: prelunet.Comparison

.. autofunction:: prelunet.find_input

.. autoclass:: prelunet.export.finding.find.Found
   :members:

.. autoclass:: prelunet.Client
   :members:
   :inherited-members:

.. autoclass:: prelunet.AsyncClient
   :members:
   :inherited-members:

.. autoclass:: prelunet.Credentials
   :members:

.. automodule:: prelunet.evaluator.errors

{errors}
```
"""


def options_page() -> str:
    """Return the page of all verbs and their options."""
    page = ["# Options", "", "All verbs and options, as `prelunet VERB -h` prints them.", ""]
    for name in VERBS:
        command = load_verb(name)
        context = typer.Context(command, info_name=f"prelunet {name}")
        page += [f"## prelunet {name}", "", (command.help or "").replace("\b", ""), "", "| option | |", "|---|---|"]
        for parameter in command.get_params(context):
            if record := parameter.get_help_record(context):
                option, text = (" ".join(part.split()).replace("|", "\\|").replace("<", "&lt;") for part in record)
                page.append(f"| `{option.replace('&lt;', '<')}` | {text} |")
        page.append("")
    return "\n".join(page)


def write_generated_pages(_app: Sphinx) -> None:
    """Write the pages that are made of code."""
    GENERATED.mkdir(exist_ok=True)
    (GENERATED / "options.md").write_text(options_page())
    names = [f".. autoexception:: prelunet.{kind.__name__}" for kind in (PreluNetError, *ERROR_STATUSES)]
    (GENERATED / "api.md").write_text(API.replace("{errors}", "\n\n".join(names)))


def prepare_page(_app: Sphinx, name: str, source: list[str]) -> None:
    """Append the contents to the first page, and make links to files outside docs/ downloads.

    Other readers of Markdown would show the contents as a block of code.
    """
    source[0] = re.sub(r"\]\((\.\./[^)#]*\.\w+)(#[^)]*)?\)", r"](path:\1)", source[0])
    if name == "index":
        for title, pages in SECTIONS.items():
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""])


def add_dark_pictures(app: Sphinx, tree: nodes.document) -> None:
    """Show beside each picture the one with `-dark` in its name, if there is one, to readers of the dark theme."""
    for image in list(tree.findall(nodes.image)):
        path = Path(image["uri"])
        dark = path.with_stem(f"{path.stem}-dark")
        if (DOCS / dark).exists():
            other = image.deepcopy()
            other["uri"] = str(dark)
            other["classes"], image["classes"] = ["only-dark"], ["only-light"]
            other["candidates"] = {"*": str(dark)}
            app.env.images.add_file(app.env.docname, str(dark))
            image.replace_self([image, other])


def write_formula(translator: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers show without a script from elsewhere."""
    if isinstance(node, nodes.math_block):
        formula = f'<div style="overflow-x: auto">{latex_to_mathml(node.astext(), display="block")}</div>'
    else:
        formula = latex_to_mathml(node.astext())
    translator.body.append(formula)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Connect the steps above to Sphinx's build."""
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("builder-inited", write_generated_pages)
    app.connect("source-read", prepare_page)
    app.connect("doctree-read", add_dark_pictures)
