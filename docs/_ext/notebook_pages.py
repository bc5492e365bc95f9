"""Pages of the notebooks, and the figures on their cards in the gallery."""

import ast
import base64
import json
import re
import textwrap
from pathlib import Path

SWITCH = "FAST"
"""Notebooks take few draws where this name is true, for their test. Pages are without it."""

MOST_LINES = 30
"""Longer cells are folded, and so is the first one, with imports and settings of figures."""


def is_on(test):
    """What a condition is in a full run, where the switch is off: None where that is not known."""
    if isinstance(test, ast.Name) and test.id == SWITCH:
        return False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = is_on(test.operand)
        return None if value is None else not value
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return False if False in map(is_on, test.values) else None
    return None


def of_full_run(source):
    """Code of a cell without the switch: of its conditions, the parts that a full run takes."""
    source = re.sub(rf"^{SWITCH} = .*\n", "", source, flags=re.MULTILINE)
    if SWITCH not in source and not re.search(r"\bos\.", source):
        source = re.sub(r"^import os\n", "", source, flags=re.MULTILINE)
    while (change := first_change(source)) is not None:
        start, end, text = change
        source = source[:start] + text + source[end:]
    return source


def first_change(source):
    """Where the first condition on the switch stands, and the text in its place, or None."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line, column):
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.If | ast.expr):
            continue
        span = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        is_or = isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or)
        if is_or and is_on(node.values[0]) is False:
            return span[0], place(node.values[1].lineno, node.values[1].col_offset), ""
        if isinstance(node, ast.UnaryOp) and is_on(node) is not None:
            return *span, str(is_on(node))
        if not isinstance(node, ast.If | ast.IfExp) or (value := is_on(node.test)) is None:
            continue
        taken = node.body if value else node.orelse
        if isinstance(node, ast.IfExp):
            return *span, ast.get_source_segment(source, taken)
        start, end = starts[node.lineno - 1], starts[node.end_lineno]
        if not taken:
            return start, end, ""
        body = source[starts[taken[0].lineno - 1] : starts[taken[-1].end_lineno]]
        return start, end, textwrap.indent(textwrap.dedent(body), " " * node.col_offset)
    return None


def write_changed(path, content):
    """Write bytes to a file, which keeps its time where it has them already."""
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def copy_notebooks(app):
    """Copy ../notebooks to docs/notebooks, since Sphinx reads nothing outside its source folder.

    A copy shows the code of a full run, and has a link to the notebook at the end of its first
    cell. One that has not changed keeps its time, so that its page is not built again.
    """
    target = Path(app.srcdir) / "notebooks"
    sources = {path.name: path for path in Path(app.srcdir).parent.glob("notebooks/*.ipynb")}
    for stale in target.glob("*.ipynb"):
        if stale.name not in sources:
            stale.unlink()
    for name, source in sources.items():
        notebook = json.loads(source.read_text(encoding="utf-8"))
        link = f"\n\n{{download}}`Download this notebook <../../notebooks/{name}>`"
        first = next(cell for cell in notebook["cells"] if cell["cell_type"] == "code")
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"])
            if cell["cell_type"] == "code":
                cell["source"] = of_full_run(cell["source"])
                if cell is first or cell["source"].count("\n") >= MOST_LINES:
                    cell["metadata"]["tags"] = ["hide-input"]
        notebook["cells"][0]["source"] += link
        write_changed(target / name, json.dumps(notebook).encode())


def last_figure(cells):
    """Bytes of the last PNG among the outputs of a notebook, or None."""
    figures = [
        output["data"]["image/png"]
        for cell in cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    return base64.b64decode("".join(figures[-1])) if figures else None


def write_figures(app):
    """Write the last figure of each notebook, for the cards of the gallery.

    They go to docs/notebooks beside the copies, a folder that git ignores.
    """
    folder = Path(app.srcdir) / "notebooks"
    for path in folder.glob("*.ipynb"):
        figure = last_figure(json.loads(path.read_text(encoding="utf-8"))["cells"])
        if figure is not None:
            write_changed(folder / "figures" / f"{path.stem}.png", figure)


def setup(app):
    """Copy before Sphinx looks for sources."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("builder-inited", write_figures)
    return {"parallel_read_safe": True}
