"""The site of these pages, by Sphinx: `make site` builds it into out/site."""

project = "tccompile"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "tccompile"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
smartquotes_action = "qe"  # quotes and ellipses: the two dashes of an option stay two
exclude_patterns = ["package.md"]
myst_heading_anchors = 4  # links to headings are as on GitHub
suppress_warnings = ["misc.highlighting_failure"]  # … stands for what an example leaves out


def setup(app):
    """The README lies beside the folder of the site's pages, and is its first page: links to it are links to that."""
    app.connect("source-read", lambda _, page, text: text.append(text.pop().replace("../README.md)", "index.md)")))
