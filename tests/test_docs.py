"""The code of the documentation runs, and its pages build."""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import inspect
import io
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from html.parser import HTMLParser
from inspect import signature
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pymc as pm
import pytensor
import pytest

import pymc_sgmcmc
from pymc_sgmcmc import Posterior, datasets, sources
from pymc_sgmcmc.batching import SCHEMES
from pymc_sgmcmc.step_methods import center, setup
from pymc_sgmcmc.step_methods.base import StochasticGradientStep
from pymc_sgmcmc.step_methods.estimators import ESTIMATORS
from pymc_sgmcmc.tuning.find_center import find_center
from tests.support.models import logistic_model

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="needs the folder docs of a clone")

SMALL = {
    "1_000_000": "5_000",
    "100_000": "5_000",
    "count = 20_000": "count = 2_000",
    "(1_000)": "(100)",
    "=1_000": "=100",
    "np.arange(1000), 20": "np.arange(100), 20",
    "shape=1000": "shape=100",
    "draws=1000": "draws=20",
    "tune=200": "tune=10",
    "tune=500": "tune=10",
    "slice(None, None, 5)": "slice(None)",
}
"""These replacements in the code make fewer rows, groups and draws, and thin less."""

DOCS_EXTRA = (
    "furo",
    "myst_nb",
    "numpydoc",
    "sphinx",
    "sphinx_codeautolink",
    "sphinx_copybutton",
    "sphinx_design",
)


def python_blocks(path: Path, *, long_ones: bool = False) -> list[tuple[int, str]]:
    """Blocks of Python in a Markdown file, each with the number of its first line.

    Blocks that take long are directives ``{code-block} python`` there.
    """
    text = path.read_text(encoding="utf-8")
    opening = r"(?:python|\{code-block\} python)" if long_ones else "python"
    pattern = rf"^```{opening}\n(.*?)^```$"
    return [
        (text.count("\n", 0, match.start(1)) + 1, match[1])
        for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL)
    ]


def run_blocks(path: Path, blocks: list[tuple[int, str]]) -> None:
    """Execute blocks of code one after the other, with fewer rows and draws."""
    names = {"__name__": "__main__"}
    for line, block in blocks:
        for given, small in SMALL.items():
            block = block.replace(given, small)
        # Empty lines first, so that a traceback shows the line of the page.
        code = compile("\n" * (line - 1) + block, str(path), "exec", dont_inherit=True)
        exec(code, names)


@pytest.fixture
def quick(monkeypatch):
    """Sample in this process, and compile in the fastest mode to compile."""
    sample = pm.sample

    def quiet_sample(*args, **kwargs):
        settings = {"cores": 1, "progressbar": False, "compute_convergence_checks": False}
        return sample(*args, **{**kwargs, **settings})

    monkeypatch.setattr(pm, "sample", quiet_sample)
    with pytensor.config.change_flags(mode="FAST_COMPILE", cxx=""):
        yield


@pytest.fixture(scope="module")
def built_pages(tmp_path_factory):
    """Folder of the HTML pages, built with warnings as errors."""
    missing = [name for name in DOCS_EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the extra docs: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("pages").resolve() / "html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    build = subprocess.run(
        [*command, str(DOCS), str(folder)], capture_output=True, text=True, cwd=ROOT
    )
    assert build.returncode == 0, build.stderr
    return folder


class WordsOnly(doctest.OutputChecker):
    """Comparison of outputs without their numbers, which rounding changes."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        want, got = (re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", text) for text in (want, got))
        return super().check_output(want, got, optionflags)


def test_messages_are_those_of_the_page():
    """Each message of the page on what is checked is printed by the code above it."""
    path = DOCS / "what_is_checked.md"
    text = path.read_text(encoding="utf-8").replace("```pycon", "").replace("```", "")
    page = doctest.DocTestParser().get_doctest(text, {}, path.name, str(path), 0)
    runner = doctest.DocTestRunner(
        WordsOnly(), verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE
    )
    report = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(report):
        runner.run(page, out=report.write)
    assert not runner.failures, report.getvalue()
    assert runner.tries > 40


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "docs/getting_started.md",
        "docs/index.md",
        "docs/coming_from.md",
        "docs/how_to.md",
        "docs/settings_and_runs.md",
        "docs/how_a_sampler_is_put_together.md",
        "docs/many_rows.md",
        "docs/samplers.md",
        "docs/trace_tools.md",
    ],
)
@pytest.mark.filterwarnings(
    # The leave-one-out cross-validation of so few draws.
    "ignore:Estimated shape parameter of Pareto distribution:UserWarning"
)
def test_code_runs(name, quick, capsys):
    path = ROOT / name
    blocks = python_blocks(path)
    assert blocks
    run_blocks(path, blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["docs/coming_from.md", "docs/getting_started.md", "docs/how_to.md"]
)
@pytest.mark.filterwarnings(
    "ignore:Estimated shape parameter of Pareto distribution:UserWarning",
    # Bambi's, with pandas 3.
    "ignore:For backward compatibility, 'str' dtypes:DeprecationWarning",
)
def test_code_that_takes_long_runs(name, capsys):
    """All blocks but those of files which do not exist, and of other packages."""
    path = ROOT / name
    blocks = python_blocks(path, long_ones=True)
    left_out = ("flights/", "blackjax.")
    run_blocks(path, [block for block in blocks if not any(word in block[1] for word in left_out)])


@pytest.mark.filterwarnings("ignore::pymc_sgmcmc.BatchSizeWarning")
def test_table_of_what_goes_together(monkeypatch, uncompiled):
    """The table is computed from the step methods, which refuse settings before they compile."""
    page = (DOCS / "samplers.md").read_text(encoding="utf-8")
    heading, _, *lines = (
        page.partition("## Which go together\n\n")[2].partition("\n\n")[0].split("\n")
    )
    columns = re.findall(r'"(\w+)"', heading)
    assert columns == [*ESTIMATORS, *SCHEMES]

    model = logistic_model()
    posterior = Posterior(model)
    center_of_model = find_center(posterior, posterior.initial_position)
    monkeypatch.setattr(setup, "Posterior", lambda *arguments, **settings: posterior)
    monkeypatch.setattr(center, "find_center", lambda *arguments: center_of_model)

    def takes(step_class, settings, column):
        usual = signature(step_class).parameters.get("gradient")
        if usual is None:
            return "no"
        gradient = column if column in ESTIMATORS else ESTIMATORS[usual.default](batching=column)
        if step_class is pymc_sgmcmc.Recipe:
            settings = {**settings, "D": lambda theta: 1.0}
        try:
            step_class(model=model, batch_size=50, gradient=gradient, **settings)
        except (TypeError, ValueError):
            return "no"
        return "yes"

    labels = [line.split(" | ")[0].removeprefix("| ") for line in lines]
    every = {name: getattr(pymc_sgmcmc, name) for name in pymc_sgmcmc.__all__}
    every = {
        name: cls
        for name, cls in every.items()
        if inspect.isclass(cls) and issubclass(cls, StochasticGradientStep)
    }
    others = [cls for name, cls in every.items() if f"`{name}`" not in labels[-1]]
    made = []
    for label in labels:
        calls = re.findall(r"`(\w+)(?:\((.*?)\))?`", label)
        if "JAX" in label:
            cases = [(cls, {"compile_kwargs": {"mode": "JAX"}}) for cls in others]
        elif calls:
            cases = [(every[name], eval(f"dict({settings})")) for name, settings in calls]
        else:
            cases = [(cls, {}) for cls in others]
        cells = [{takes(*case, column) for case in cases} for column in columns]
        made.append(f"| {label} | {' | '.join('/'.join(sorted(cell)) for cell in cells)} |")
    assert made == lines


EFFECTIVE = DOCS / "effective_draws.txt"


def cells_of(path: Path) -> list[list[str]]:
    """Cells of the rows of the first table in a file."""
    lines = path.read_text(encoding="utf-8").split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def part_within(wanted: Callable[[str], bool], *tables: str) -> str:
    """Part of the coordinates that are within the bounds, in the wanted rows of tables."""
    counts = []
    for name in tables:
        for posterior, _, coordinates, within, *_ in cells_of(DOCS / "tables" / name):
            if wanted(posterior):
                counts.append((int(coordinates), float(within)))
    total = sum(coordinates for coordinates, _ in counts)
    return f"{sum(coordinates * within for coordinates, within in counts) / total:.2f}"


def test_accuracy_in_short_is_that_of_the_tables():
    def has_groups(posterior):
        return re.search("districts|each subject|59 subjects|294 groups|persons|76", posterior)

    def is_horseshoe(posterior):
        return "horseshoe" in posterior

    def is_flat(posterior):
        return not has_groups(posterior) and not is_horseshoe(posterior)

    text = (DOCS / "accuracy.md").read_text(encoding="utf-8").partition("\nIn short, ")[2]
    regressions, skewed, joint, integrated, horseshoe = re.findall(r"\| (\S+) \|\n", text)[2:7]
    assert regressions == part_within(is_flat, "regressions.txt")
    assert skewed == part_within(is_flat, "gallery.txt")
    assert joint == part_within(has_groups, "regressions.txt", "gallery.txt")
    assert horseshoe == part_within(is_horseshoe, "gallery.txt")
    # All models, with groups in the place of rows.
    assert integrated == part_within(lambda _: True, "hierarchical.txt")
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    assert f"| {integrated} of the global coordinates of 14 models within" in page
    assert f"horseshoe prior only {float(horseshoe):.0%}".replace("%", " %") in page


def test_seconds_in_the_texts_are_those_of_the_table():
    table = {
        (int(n), name): (warm, ratio) for n, name, _, warm, *_, ratio, _ in cells_of(EFFECTIVE)
    }

    def seconds(rows, contender):
        if (warm := table[rows, contender][0]) == "":
            return "over 60"
        return f"{float(warm):.1f}" if float(warm) < 9.95 else f"{float(warm):.0f}"

    def factor(rows, contender):
        return f"{float(table[rows, contender][1]):.2f}"

    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    lines = page.partition("## Beside other packages")[2].split("\n\n")[3].splitlines()[2:]
    order = ("ours", "corrected", "nutpie", "hmcecs", "blackjax", "blackjax_fine", "sgmcmcjax")
    for line, contender in zip(lines, order, strict=True):
        cells = [seconds(10**4, contender), seconds(10**6, contender)]
        assert line.split(" | ")[-3:] == [*cells, f"× {factor(10**4, contender)} |"]

    shown = ("ours", "corrected", "nutpie")
    for power, exponent in zip((4, 5, 6, 7), "⁴⁵⁶⁷", strict=True):
        cells = " | ".join(seconds(10**power, contender) for contender in shown)
        assert f"\n| 10{exponent} | {cells} |\n" in page
    of_draws = " | ".join(factor(10**4, contender) for contender in shown)
    assert f"worst coordinate | {of_draws}, at 10⁴ |" in page
    for contender in shown[:2]:
        assert (
            f"| {seconds(10**4, contender)} s at 10⁴ rows and {seconds(10**7, contender)} s" in page
        )


def test_costs_in_the_table_of_choices_are_those_of_the_tables():
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    groups = {tuple(cells[:3]): cells for cells in cells_of(DOCS / "tables" / "groups.txt")}
    few, many = (groups[count, "10", "`marginalize`, `SGLDCV()`"] for count in ("1000", "1000000"))
    local = groups["1000", "10", '`SGLDCV(gradient=LocalSampling("z"))`']
    setup = f"{float(few[3]):.0f} s of set-up at 10³ groups and {many[3]} s at 10⁶"
    assert f"| {setup}; {few[-1]} and {many[-1]} effective draws a second" in page
    assert f"| {float(local[-1]):.0f} effective draws a second at 10³ groups" in page
    (files,) = (
        cells
        for cells in cells_of(DOCS / "tables" / "many_rows.txt")
        if cells[:2] == ["100000000", "files"]
    )
    assert f"| {float(files[9]):.0f} s and {float(files[10]):.1f} GiB to 1000 effective" in page
    assert f"standard deviations {float(files[11]):.2f} times those" in page


def test_ranges_of_the_samplers_are_those_of_their_table():
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    lacking = {}
    for name, *cells in cells_of(DOCS / "tables" / "samplers.txt"):
        step_method = re.match(r"`\w+`", name)
        if step_method is None:  # Rows and coordinates, or settings that are not the default ones.
            continue
        pairs = [cell.split(", ") for cell in cells if cell != "–"]
        lacking[step_method[0]] = len(cells) - len(pairs)
        parts, rates = ([float(pair[number]) for pair in pairs] for number in (0, 1))
        within = f"{min(parts):.2f}–{max(parts):.2f}" if min(parts) < max(parts) else "1.00"
        assert f"| {step_method[0]} | {within} | {min(rates):.0f}–{max(rates):.0f} |" in page
    told = re.findall(r"(`\w+`) has no figures for (\w+) of the seven models", page)
    words = ["", "one", "two", "three", "four", "five", "six"]
    assert dict(told) == {name: words[count] for name, count in lacking.items() if count}


def test_readme_is_short_and_begins_with_the_installation():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 600
    assert any("pip install" in line for line in text.splitlines()[:30])
    assert text.count("```text") == 1  # the example has its output


def test_intervals_in_the_picture_of_the_readme_are_ten_times_narrower():
    words = "ten times narrower ones by SGLDCV on all rows"
    for page in (ROOT / "README.md", DOCS / "index.md"):
        assert words in page.read_text(encoding="utf-8")
    for *_, of_part, _, of_all in cells_of(DOCS / "tables" / "part_and_all.txt"):
        assert 9 < float(of_part) / float(of_all) < 11


def test_changelog_has_one_line_an_entry():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = text.partition("\n## ")[2].partition("\n## ")[0]
    lines = [line for line in newest.splitlines()[3:] if line and not line.startswith("### ")]
    assert len(lines) <= 120
    assert all(line.startswith("- ") for line in lines)


def test_dir_has_the_public_names_alone():
    names = dir(pymc_sgmcmc)
    assert set(names) == set(pymc_sgmcmc.__all__)
    assert "open_rows" in names
    assert not [name for name in names if inspect.ismodule(getattr(pymc_sgmcmc, name))]


PUBLIC = {
    module: set(module.__all__) - {"__version__"} for module in (pymc_sgmcmc, datasets, sources)
}


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_api_lists_all_public_names(module):
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    assert PUBLIC[module] <= set(re.findall(r"^   (\w+)$", page, re.MULTILINE))


def test_each_public_name_has_a_page(built_pages):
    pages = {path.stem.rpartition(".")[2] for path in (built_pages / "api").glob("*.html")}
    assert set.union(*PUBLIC.values()) <= pages


GUIDES = (
    "accuracy",
    "choosing",
    "coming_from",
    "getting_started",
    "groups",
    "how_to",
    "many_rows",
    "samplers",
    "settings_and_runs",
    "trace_tools",
    "what_is_checked",
)
FEWEST_LINKS = 3
"""A guide has links to the pages of at least so many objects."""


def test_guides_have_links_to_the_api(built_pages):
    links = {
        name: {
            urlsplit(target).path
            for target in PageLinks(built_pages / f"{name}.html").targets
            if target.startswith("api/") and "#" in target  # those of the navigation have none
        }
        for name in GUIDES
    }
    few = {name: len(found) for name, found in links.items() if len(found) < FEWEST_LINKS}
    assert not few


def test_dashboards_of_clusters_are_for_this_machine_alone():
    """Dask's default address is open to the network."""
    starts = re.compile(r"LocalCluster\(|\bClient\(\s*n_workers|cluster = \{")
    suffixes = (".md", ".ipynb", ".py")
    files = [
        path
        for folder in ("docs", "notebooks", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and path != Path(__file__)
    ]
    of_files = {path: path.read_text(encoding="utf-8") for path in [*files, ROOT / "README.md"]}
    clusters = {
        f"{path.name}: {text[start.start() : start.start() + 250]}"
        for path, text in of_files.items()
        for start in starts.finditer(text)
        if "LocalCluster(**" not in text[start.start() :][:20]
    }
    assert len(clusters) >= 4
    assert not [each for each in clusters if "127.0.0.1:0" not in each]


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("N = (4, 2) if FAST else (200, 10)\n", "N = (200, 10)\n"),
        ("rows[: len(rows) // (10 if FAST else 100)]", "rows[: len(rows) // (100)]"),
        ("if FAST:\n    X = X[:5]\nY = X", "Y = X"),
        ("for x in y:\n    if not FAST:\n        f(x)  # é\n        g(x)\nh()",
         "for x in y:\n    f(x)  # é\n    g(x)\nh()"),
        ("if FAST and name == 'a':\n    a()\nelse:\n    b()\n", "b()\n"),
        ("assert FAST or ok\nf(rerun=not FAST)", "assert ok\nf(rerun=True)"),
        ("import os\nFAST = bool(os.environ.get('FAST'))\nx = 1", "x = 1"),
        ("mode = 'FAST_COMPILE'", "mode = 'FAST_COMPILE'"),
    ],
)  # fmt: skip
def test_pages_of_notebooks_have_the_code_of_a_full_run(cell, shown):
    path = DOCS / "_ext" / "notebook_pages.py"
    spec = importlib.util.spec_from_file_location("notebook_pages", path)
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    assert pages.of_full_run(cell) == shown


MOST_WORDS = 30
"""A card of the gallery has at most so many words."""


def test_gallery_has_a_short_card_for_each_notebook(built_pages):
    gallery = (built_pages / "gallery.html").read_text(encoding="utf-8")
    cards = (DOCS / "gallery.md").read_text(encoding="utf-8")
    for path in ROOT.glob("notebooks/*.ipynb"):
        assert f'href="notebooks/{path.stem}.html"' in gallery
        card = re.search(rf"^:link: notebooks/{path.stem}$.*?^:::$", cards, re.M | re.S)
        assert card is not None, path.stem
        words = [line for line in card[0].splitlines()[1:] if not line.startswith(":")]
        assert 0 < len(" ".join(words).split()) <= MOST_WORDS, path.stem


def test_pages_build_without_warnings(built_pages):
    assert (built_pages / "index.html").exists()


class PageLinks(HTMLParser):
    """Targets of the links of a page, and the names that links to it may have after the #."""

    def __init__(self, page: Path):
        super().__init__()
        self.targets: set[str] = set()
        self.names = {""}
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if given.get("id"):
            self.names.add(given["id"])
        target = given.get("href") if tag == "a" else given.get("src") if tag == "img" else None
        if target and not urlsplit(target).scheme:
            self.targets.add(target)


def test_links_between_pages(built_pages):
    """Each link to a page, a place in a page or a figure of the documentation leads there.

    Listings of the code are left out: they name a class by the module that exports it, which need
    not be the one that the page of it names.
    """
    pages = {path.resolve(): PageLinks(path) for path in built_pages.rglob("*.html")}
    broken = []
    for path, page in pages.items():
        listing = (built_pages / "_modules").resolve() in path.parents
        for target in () if listing else page.targets:
            link = urlsplit(target)
            goal = (path.parent / unquote(link.path)).resolve() if link.path else path
            known = goal not in pages or unquote(link.fragment) in pages[goal].names
            if not goal.exists() or not known:
                broken.append(f"{path.relative_to(built_pages)}: {target}")
    assert not broken
