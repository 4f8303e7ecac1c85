"""The documentation as a site: `sphinx-build -W docs docs/_build`. It needs no network."""

from agentruns import __version__

project = "agentruns"
author = "agentruns contributors"
copyright = author
version = release = __version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
nitpicky = True
suppress_warnings = [
    "misc.highlighting_failure"
]  # a curl command over several lines is coloured all the same

html_theme = "furo"
html_title = f"agentruns {version}"
html_extra_path = ["llms.txt"]
html_static_path = html_css_files = ["site.css"]
