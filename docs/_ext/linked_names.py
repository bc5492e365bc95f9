"""Links of the names of documented objects, in the text of pages and in docstrings."""

import re

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.util.nodes import make_refnode

MODULES = {"pm": "pymc", "az": "arviz", "pt": "pytensor.tensor", "bmb": "bambi"}
"""Names under which the code of the pages imports other packages."""


def documented_name(app, text):
    """Full name of the object that code such as ``sample()`` or ``step=SGLD()`` names, or None.

    Names of this package may come without its modules where only one object has them, and a method
    with its class. Those of PyMC and ArviZ begin with ``pm.`` and ``az.``, and the inventories say
    whether there is one.
    """
    match = re.fullmatch(r"(?:\w+=)?([A-Za-z_][\w.]*)(?:\(.*\))?", text, re.DOTALL)
    if match is None:
        return None
    alias, _, rest = match[1].partition(".")
    if alias in MODULES and rest:
        return f"{MODULES[alias]}.{rest}"
    objects = app.env.get_domain("py").objects
    names = [
        name
        for name, entry in objects.items()
        if f".{name}".endswith(f".{match[1]}")
        and ("." in match[1] or entry.objtype in ("class", "exception", "function"))
    ]
    exported = [name for name in names if name == f"pymc_sgmcmc.{match[1]}"]
    chosen = exported or [name for name in names if not objects[name].aliased]
    return chosen[0] if len(chosen) == 1 and chosen[0].startswith("pymc_sgmcmc.") else None


def link_names(app, doctree, docname):
    """Make links of the names of documented objects in the text of pages, once a section."""
    if docname.startswith("api/"):
        return
    for section in doctree.findall(nodes.section):
        linked = set()
        for literal in section.findall(nodes.literal):
            within = literal.parent
            while within is not None and not isinstance(within, nodes.section):
                if isinstance(within, nodes.reference | nodes.title | pending_xref):
                    break
                within = within.parent
            target = documented_name(app, literal.astext())
            if within is not section or target is None or target in linked:
                continue
            link = resolved(app, docname, target, literal.deepcopy())
            if link is not None:
                linked.add(target)
                literal.replace_self(link)


def resolved(app, docname, target, content):
    """A link to an object of this package or of another manual, None where there is none."""
    domain = app.env.get_domain("py")
    if target in domain.objects:
        entry = domain.objects[target]
        return make_refnode(app.builder, docname, entry.docname, entry.node_id, content, target)
    wanted = pending_xref("", refdomain="py", reftype="obj", reftarget=target)
    return app.emit_firstresult("missing-reference", app.env, wanted, content)


def link_short_name(app, env, node, content):
    """Resolve a name in a docstring that is written without the module it is from."""
    if node.get("refdomain") != "py" or node["reftarget"].startswith("pymc."):
        return None
    target = documented_name(app, node["reftarget"])
    if target is None or target not in env.get_domain("py").objects:
        return None
    return resolved(app, node["refdoc"], target, content)


def setup(app):
    """Link after intersphinx, whose priority is that of an event without one, 500."""
    app.connect("doctree-resolved", link_names)
    app.connect("missing-reference", link_short_name, priority=600)
    return {"parallel_read_safe": True}
