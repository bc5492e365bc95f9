"""Sphinx configuration: python -m sphinx -W -b html docs docs/_build/html."""

import inspect
import shutil
from pathlib import Path

from pymc.step_methods.compound import BlockedStep
from sphinx.util.inspect import stringify_signature

import pymc_sgmcmc

project = "pymc_sgmcmc"
author = "The pymc_sgmcmc developers"
copyright = author  # a name that Sphinx prescribes
release = version = pymc_sgmcmc.__version__

# No intersphinx: the build must not need the network.
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "numpydoc",
    "myst_nb",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
default_role = "py:obj"  # `SGLD` in a docstring is a link

html_theme = "furo"
html_title = f"pymc_sgmcmc {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Notebooks are shown as they are stored; a test executes them.
nb_execution_mode = "off"

autodoc_typehints = "none"  # numpydoc sections state the types
autosummary_generate = True
numpydoc_show_class_members = False
numpydoc_xref_param_type = False


def copy_notebooks(app):
    """Copy ../notebooks to docs/notebooks, since Sphinx reads nothing outside its source folder.

    A notebook is listed in index.md as notebooks/<name>. One that has not changed keeps its time,
    so that its page is not built again.
    """
    target = Path(app.srcdir) / "notebooks"
    sources = {path.name: path for path in Path(app.srcdir).parent.glob("notebooks/*.ipynb")}
    for stale in target.glob("*.ipynb"):
        if stale.name not in sources:
            stale.unlink()
    for name, source in sources.items():
        copy = target / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            target.mkdir(exist_ok=True)
            shutil.copyfile(source, copy)


def step_method_signature(app, what, name, obj, options, signature, return_annotation):
    """Signature of `__init__` for a step method: PyMC's `__new__` would hide it."""
    if what != "class" or not issubclass(obj, BlockedStep):
        return None
    parameters = list(inspect.signature(obj.__init__).parameters.values())[1:]
    shown = stringify_signature(inspect.Signature(parameters), show_annotation=False)
    return shown, return_annotation


def setup(app):
    """Register the copying, which must come before Sphinx looks for sources, and signatures."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("autodoc-process-signature", step_method_signature)
