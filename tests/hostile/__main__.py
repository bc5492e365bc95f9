"""Judge the catalogue of bad inputs and planted faults: ``python -m tests.hostile [-k PATTERN]``.

Prints a line for each case, and the number of cases for each verdict. The exit status is 1 where a
case ended in a wrong answer without a word ("silent") or in an exception of another library
("raw").
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter

from tests.hostile.case import AGREES, CASES, CLEAR, RAW, SILENT, judge
from tests.hostile.catalogue import MODULES

WIDTH = 150
"""Characters shown of a message."""


def main() -> int:
    """Judge cases, and print the verdicts."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("-k", default="", metavar="PATTERN", help="only names that match this")
    parser.add_argument("--fast", action="store_true", help="without the slow ones")
    parser.add_argument("--full", action="store_true", help="whole messages, not their beginnings")
    options = parser.parse_args()
    chosen = [
        case
        for case in CASES.values()
        if re.search(options.k, case.name) and not (options.fast and case.slow)
    ]
    counts: Counter[str] = Counter()
    for case in chosen:
        start = time.perf_counter()
        verdict = judge(case)
        counts[verdict.word] += 1
        text = " ".join(verdict.text.split())
        shown = text if options.full or len(text) <= WIDTH else text[: WIDTH - 1] + "…"
        seconds = time.perf_counter() - start
        print(f"{verdict.word:7}{seconds:6.1f} s  {case.name}: {shown}", flush=True)
    listed = ", ".join(f"{counts[word]} {word}" for word in (CLEAR, AGREES, RAW, SILENT))
    print(f"{len(chosen)} cases of {', '.join(MODULES)}: {listed}")
    return 1 if counts[RAW] or counts[SILENT] else 0


if __name__ == "__main__":
    sys.exit(main())
