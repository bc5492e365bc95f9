"""Sphinx configuration: python -m sphinx -W -b html docs docs/_build/html."""

import base64
import inspect
import json
import re
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

    The gallery lists all of them. One that has not changed keeps its time, so that its page is not
    built again.
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


def first_sentence(text):
    """First sentence of Markdown text, with links as their words."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
    return re.split(r"(?<=[.?!])\s", words, maxsplit=1)[0]


def title_and_summary(cells):
    """Title and first sentence of a notebook, from its cells of Markdown."""
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    title, _, rest = text.strip().partition("\n")
    paragraphs = (paragraph for paragraph in rest.split("\n\n") if paragraph.strip())
    return title.removeprefix("# "), first_sentence(next(paragraphs, ""))


def last_figure(cells):
    """Bytes of the last PNG among the outputs of a notebook, or None."""
    figures = [
        output["data"]["image/png"]
        for cell in cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    return base64.b64decode("".join(figures[-1])) if figures else None


def write_changed(path, content):
    """Write bytes to a file, which keeps its time where it has them already."""
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def write_gallery(app):
    """Write the cards of the gallery, one for each notebook, and the figures on them.

    They go to docs/notebooks beside the copies, a folder that git ignores. gallery.md includes the
    cards, so that a new notebook appears without a change of any page.
    """
    folder = Path(app.srcdir) / "notebooks"
    paths = sorted(folder.glob("*.ipynb"), key=lambda path: (path.stem != "quickstart", path.stem))
    cards = []
    for path in paths:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        title, summary = title_and_summary(cells)
        figure = last_figure(cells)
        lines = [":::{container} gallery-card"]
        if figure is not None:
            write_changed(folder / "figures" / f"{path.stem}.png", figure)
            lines += [f"![Last figure of this notebook](notebooks/figures/{path.stem}.png)", ""]
        lines += [f"**[{title}](notebooks/{path.name})**", "", summary, ":::"]
        cards.append("\n".join(lines))
    cards = ["::::{container} gallery", *cards, "::::", ""]
    write_changed(folder / "gallery.txt", "\n\n".join(cards).encode())


def step_method_signature(app, what, name, obj, options, signature, return_annotation):
    """Signature of a step method without types: PyMC's `__new__` would hide it."""
    if what != "class" or not issubclass(obj, BlockedStep):
        return None
    shown = stringify_signature(inspect.signature(obj), show_annotation=False)
    return shown, return_annotation


def setup(app):
    """Register the copying, which must come before Sphinx looks for sources, and signatures."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("builder-inited", write_gallery)
    app.connect("autodoc-process-signature", step_method_signature)
