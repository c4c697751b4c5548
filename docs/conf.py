"""Sphinx configuration: MyST pages, furo, docstrings."""

import unskip

project = "unskip"
author = "the unskip authors"
copyright = "2026, the unskip authors"
release = version = unskip.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "unskip"
nitpicky = False
