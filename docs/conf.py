"""Sphinx configuration: MyST pages, furo, docstrings, formulas that need no network."""

import json
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

import unskip
from unskip.methods import describe_method, method_names

sys.path.insert(0, str(Path(__file__).parent))
from support import support_table

project = "unskip"
author = "the unskip authors"
copyright = "2026, the unskip authors"
release = version = unskip.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown", ".ipynb": "markdown"}  # `_notebook` makes Markdown of the latter
html_theme = "furo"
html_title = "unskip"
html_static_path = ["_static"]
html_css_files = ["unskip.css"]
nitpicky = False
html_math_renderer = "mathml"


def _math(self: HTML5Translator, node: nodes.math) -> None:
    """MathML, which browsers draw by themselves: Sphinx's own way asks a server for MathJax whenever a page opens."""
    block = isinstance(node, nodes.math_block)
    # Without a font for formulas U+02C6 would stand inside its letter.
    drawn = tex2mathml(node.astext(), as_block=block).replace("\u02c6", "^")
    self.body.append(f'<div style="overflow-x: auto; margin: 1em 0">{drawn}</div>' if block else drawn)
    raise nodes.SkipNode


def _methods(app: Sphinx, page: str, source: list[str]) -> None:
    """Fills the page of methods from the registry."""
    if page == "methods":
        lines = []
        for method in map(describe_method, method_names()):
            lines += ["", f"## `{method.name}`", "", method.summary]
            if method.options:
                lines += ["", "| option | default (others) | |", "|---|---|---|"]
            for option in method.options:
                words = option.doc.replace("|", "\\|")
                lines.append(f"| `{option.name}` | {option.values} | {words} |")
        source[0] = source[0].replace("<!-- methods -->", "\n".join(lines)).replace("<!-- support -->", support_table())


def _notebook(app: Sphinx, page: str, source: list[str]) -> None:
    """Makes a page of a notebook: its text, its code, and what was printed and drawn when it was run."""
    if app.env.doc2path(page).suffix != ".ipynb":
        return
    parts = []
    for cell in json.loads(source[0])["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            if not parts:  # the head
                head, mark, rest = text.partition("\n## ")
                text = f"{head}\n\n{{download}}`Download this notebook <{Path(page).name}.ipynb>`\n{mark}{rest}"
            parts.append(text)
            continue
        language, code = ("sh", text.partition("\n")[2]) if text.startswith("%%sh") else ("python", text)
        parts.append(f"```{language}\n{code}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                png = "".join(data["image/png"]).replace("\n", "")
                parts.append(f'<img class="output" alt="What the code above draws." src="data:image/png;base64,{png}">')
            else:
                shown = "".join(output.get("text") or data["text/plain"]).rstrip()
                parts.append(f"````{{code-block}} text\n:class: output\n\n{shown}\n````")
    source[0] = "\n\n".join(parts)


def setup(app: Sphinx) -> None:
    """Connects the list of methods, the notebooks and the renderer."""
    app.connect("source-read", _methods)
    app.connect("source-read", _notebook)
    app.add_html_math_renderer("mathml", (_math, None), (_math, None))
