"""How the site is built: ``sphinx-build -W --keep-going -b html docs site``."""

import lt_tiled

project = "lt_tiled"
copyright = "the lt_tiled authors"
version = release = lt_tiled.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"

html_theme = "furo"
html_title = f"lt_tiled {release}"
