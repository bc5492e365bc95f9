"""Every work that package, documentation and notebooks cite is on the page of references."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from pathlib import Path

import pytest

import pymc_sgmcmc

PACKAGE = Path(pymc_sgmcmc.__file__).parent
PAGE = Path(__file__).parents[1] / "docs/references.md"
NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the folder docs of a clone")

NAME = r"(?:El hanchi|(?:De |Le)?[A-Z][a-z]+(?:[A-Z-][a-z]+)*)"
INITIALS = r"(?:[A-Z]\.[ -]?)*"
AUTHOR = rf"{INITIALS}{NAME}"
CITATION = re.compile(
    rf"\b({AUTHOR}(?:(?:, and |, | and ){AUTHOR})*)(?: et al\.)?,? \(?((?:19|20)\d\d)\b"
)
"""Names, then a year, as in "Ma, Chen and Fox (2015)" or "(Ahn et al. 2015"."""

OTHERS = {(("Dataset",), "1934"), (("With",), "2000")}
"""What looks like a citation and is none: 1934 women, and 2000 draws."""


def plain(text: str) -> str:
    """Text with single spaces and without accents."""
    letters = unicodedata.normalize("NFKD", text)
    return " ".join("".join(letter for letter in letters if ord(letter) < 128).split())


def citations_of(text: str) -> set[tuple[tuple[str, ...], str]]:
    """Surnames and year of each work that a text cites."""
    return {
        (tuple(re.findall(NAME, re.sub(r"\b[A-Z]\.", "", names))), year)
        for names, year in CITATION.findall(plain(text))
    }


def texts_of(path: Path) -> list[str]:
    """Strings of a module, with its docstrings."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [
        node.value
        for node in tree
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def text_of_cells(path: Path) -> str:
    """Markdown and code of a notebook, without outputs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def entries() -> list[str]:
    """The items of the list of references."""
    return [plain(entry) for entry in PAGE.read_text(encoding="utf-8").split("\n- ")[1:]]


def listed(names: tuple[str, ...], year: str, references: list[str]) -> bool:
    """Whether one of the references begins with these names and has this year."""
    for reference in references:
        authors, _, rest = reference.partition(" (")
        if rest.startswith(year) and authors.startswith(names[0]):
            surnames = set(re.findall(NAME, authors))
            if set(names) <= surnames:
                return True
    return False


def test_how_works_are_cited():
    text = "As Ma, Chen and Fox (2015) and (Ahn et al.\n    2015; El hanchi 2018, eq. 8) say."
    assert citations_of(text) == {
        (("Ma", "Chen", "Fox"), "2015"),
        (("Ahn",), "2015"),
        (("El hanchi",), "2018"),
    }
    listing = "U. Şimşekli, R. Badeau, A. T. Cemgil and G. Richard (2016). Stochastic"
    assert citations_of(listing) == {(("Simsekli", "Badeau", "Cemgil", "Richard"), "2016")}


def test_all_works_are_listed():
    references = entries()
    texts = {path: "\n\n".join(texts_of(path)) for path in PACKAGE.rglob("*.py")}
    texts |= {path: path.read_text(encoding="utf-8") for path in PAGE.parent.rglob("*.md")}
    texts |= {path: text_of_cells(path) for path in NOTEBOOKS.glob("*.ipynb")}
    cited = {
        (*citation, path.name) for path, text in texts.items() for citation in citations_of(text)
    }
    assert len(cited) > 50
    missing = {work for work in cited if not listed(*work[:2], references)}
    assert not {work for work in missing if work[:2] not in OTHERS}


def test_references_are_in_alphabetical_order():
    authors = [reference.partition(" (")[0].lower() for reference in entries()]
    assert authors == sorted(authors)
