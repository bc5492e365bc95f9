"""Topics of the whole Associated Press corpus: perplexity of held-out words along the chain.

    python -m tests.accuracy.topics FOLDER_OF_DATA [SAMPLER ...] [--draws D] [--words W]

prints the perplexity of scikit-learn's variational Bayes, and for each of sgld, sgldcv and sgrld
the perplexity of the mean prediction over the second half of the draws so far, by passes over the
documents and processor seconds. The default is all words, 10 topics, and 200 draws of 20
transitions with 50 documents each.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from tests.support.topics import Topics

LOOKS = 10
"""The perplexity is printed so many times."""


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data_folder", type=Path)
    parser.add_argument("samplers", nargs="*", default=["sgrld", "sgld", "sgldcv"])
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--thin", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--words", type=int, default=100_000)
    arguments = parser.parse_args()
    topics = Topics.from_corpus(arguments.data_folder, words=arguments.words)
    documents, words = topics.train.shape
    print(f"{documents} documents, {words} words, longest {topics.train.sum(1).max()}")
    begin = time.process_time()
    print(
        f"variational: {topics.variational():.0f}, {time.process_time() - begin:.0f} s", flush=True
    )
    for sampler in arguments.samplers:
        kept: list[np.ndarray] = []
        begin = time.process_time()
        settings = {"batch_size": arguments.batch_size, "thin": arguments.thin}
        for draw in topics.sample(sampler, draws=arguments.draws, **settings):
            kept.append(draw)
            if len(kept) % max(1, arguments.draws // LOOKS):
                continue
            seconds = time.process_time() - begin
            passes = len(kept) * arguments.thin * arguments.batch_size / documents
            half = kept[len(kept) // 2 :]
            perplexity = topics.perplexity(half[:: max(1, len(half) // LOOKS)])
            print(f"{sampler}: {passes:.0f} passes, {perplexity:.0f}, {seconds:.0f} s", flush=True)
            begin = time.process_time() - seconds


if __name__ == "__main__":
    main()
