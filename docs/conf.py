"Sphinx's settings. `make docs` calls it on the tree that docs/make.py makes; nothing is run, nothing asks the network."
from configparser import ConfigParser
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ini = ConfigParser(delimiters=["="])
ini.read(HERE.parent/"settings.ini", encoding="utf-8")

project = ini["DEFAULT"]["name"]
author = ini["DEFAULT"]["author"]
release = ini["DEFAULT"]["version"]
copyright = f"{author}. {ini['DEFAULT']['license']}"
html_title = f"{project} {release}"

extensions = ["myst_nb", "sphinx.ext.mathjax"]
exclude_patterns = ["_extra"]
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_dmath_double_inline = True
myst_heading_anchors = 5
suppress_warnings = ["misc.highlighting_failure"]    # `…` in prose stands for code that is left out

# The site carries MathJax: one file that loads no other, from a package of pip's (Makefile, .venv/.docs)
package = find_spec("mathjax")
MATHJAX = Path(package.origin).parent/"static/mathjax/es5/tex-svg-full.js" if package else None
if not MATHJAX or not MATHJAX.exists():
    raise FileNotFoundError("docs/conf.py: there is no MathJax; `make docs` installs it from django-static-mathjax")
mathjax_path = MATHJAX.name

html_theme = "furo"
html_favicon = str(HERE/"favicon.svg")
html_static_path = [str(HERE/"style.css"), str(MATHJAX)]
html_css_files = ["style.css"]
templates_path = [str(HERE/"templates")]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_theme_options = dict(sidebar_hide_name=False, navigation_with_keys=True, top_of_page_buttons=[])


def setup(app):
    "Twins and llms.txt lie in the tree, beside the pages."
    app.config.html_extra_path = [str(app.srcdir/"_extra")]
