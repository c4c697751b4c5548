"""Sphinx configuration: MyST pages, furo, docstrings, formulas that need no network."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

import unskip

project = "unskip"
author = "the unskip authors"
copyright = "2026, the unskip authors"
release = version = unskip.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "unskip"
nitpicky = False
html_math_renderer = "mathml"


def _math(self: HTML5Translator, node: nodes.math) -> None:
    """MathML, which browsers draw by themselves: Sphinx's own way asks a server for MathJax whenever a page opens."""
    block = isinstance(node, nodes.math_block)
    # Without a font for formulas U+02C6 would stand inside its letter.
    drawn = tex2mathml(node.astext(), as_block=block).replace("\u02c6", "^")
    self.body.append(f'<div style="overflow-x: auto; margin: 1em 0">{drawn}</div>' if block else drawn)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Makes the renderer known to Sphinx."""
    app.add_html_math_renderer("mathml", (_math, None), (_math, None))
