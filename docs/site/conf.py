"""Sphinx's configuration of the site. `docs/site/build.py` runs it on a copy of the pages."""

from sphinx.application import Sphinx

from docs.site.docstrings import process

project = "spmdctx"
author = "The spmdctx authors"
copyright = author

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
root_doc = "docs/index"

html_theme = "sphinx_book_theme"
html_title = "spmdctx"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "use_download_button": False,
    "show_toc_level": 2,
    "navbar_persistent": [],
    "pygments_light_style": "a11y-high-contrast-light",
}

highlight_language = "text"
default_role = "code"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "attrs_inline"]

# Each cell runs, and one that fails or warns ends the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 900
nb_execution_in_temp = True
nb_merge_streams = True
nb_execution_excludepatterns = ["notebooks/*"]
nb_output_stderr = "remove-warn"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Types of other libraries are named, and not linked.
nitpick_ignore_regex = [("py:.*", ".*")]


def setup(app: Sphinx) -> None:
    """Lets autodoc read docstrings as they are written here, before their sections are read."""
    app.connect("autodoc-process-docstring", process, priority=400)
