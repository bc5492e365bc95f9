"""Sphinx configuration: python -m sphinx -W -b html docs docs/_build/html."""

import inspect
import sys
import zlib
from pathlib import Path

from pymc.step_methods.compound import BlockedStep
from sphinx.util.inspect import stringify_signature

import pymc_sgmcmc

sys.path.append(str(Path(__file__).parent / "_ext"))

project = "pymc_sgmcmc"
author = "The pymc_sgmcmc developers"
copyright = author  # a name that Sphinx prescribes
release = version = pymc_sgmcmc.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_nb",
    "sphinx_codeautolink",
    "sphinx_copybutton",
    "sphinx_design",
    "linked_names",
    "notebook_pages",
]
exclude_patterns = ["_build", "_ext", "_templates", "**.ipynb_checkpoints"]
templates_path = ["_templates"]
default_role = "py:obj"  # `SGLD` in a docstring is a link

html_theme = "furo"
html_title = f"pymc_sgmcmc {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Notebooks are shown as they are stored; a test executes them.
nb_execution_mode = "off"
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"

autodoc_typehints = "none"  # numpydoc sections state the types
autosummary_generate = True
codeautolink_concat_default = True  # the blocks of a page run one after the other
suppress_warnings = ["codeautolink.match_block"]  # of docstrings with "# doctest: +SKIP"
copybutton_exclude = ".linenos, .gp, .go"

MANUALS = {
    "arviz": "https://python.arviz.org/en/stable",
    "bambi": "https://bambinos.github.io/bambi",
    "numpy": "https://numpy.org/doc/stable",
    "pymc": "https://www.pymc.io/projects/docs/en/stable",
    "pytensor": "https://pytensor.readthedocs.io/en/latest",
    "python": "https://docs.python.org/3",
    "xarray": "https://docs.xarray.dev/en/stable",
}
NO_NAMES = Path(__file__).parent / "_build" / "no_names.inv"
"""An inventory without names, which takes the place of one that the network does not give: the
pages are then built without these links."""
NO_NAMES.parent.mkdir(exist_ok=True)
NO_NAMES.write_bytes(
    b"# Sphinx inventory version 2\n# Project: none\n# Version: 0\n"
    b"# The remainder of this file is compressed using zlib.\n" + zlib.compress(b"")
)
intersphinx_mapping = {name: (url, (None, str(NO_NAMES))) for name, url in MANUALS.items()}
intersphinx_timeout = 5
numpydoc_show_class_members = False
numpydoc_xref_param_type = False


def step_method_signature(app, what, name, obj, options, signature, return_annotation):
    """Signature of a step method without types: PyMC's `__new__` would hide it."""
    if what != "class" or not issubclass(obj, BlockedStep):
        return None
    shown = stringify_signature(inspect.signature(obj), show_annotation=False)
    return shown, return_annotation


INTERNAL = {"compile_for_setup", "row_elements"}
"""Methods of `Posterior` that the package alone needs."""


def skip_member(app, what, name, obj, skip, options):
    """Leave out what a step method does for PyMC, and what the package alone needs."""
    owner = getattr(pymc_sgmcmc, getattr(obj, "__qualname__", "").partition(".")[0], None)
    of_step = inspect.isclass(owner) and issubclass(owner, BlockedStep)
    return True if of_step or name in INTERNAL else None


def setup(app):
    """Register signatures, and which members the pages of classes have."""
    app.connect("autodoc-process-signature", step_method_signature)
    app.connect("autodoc-skip-member", skip_member)
