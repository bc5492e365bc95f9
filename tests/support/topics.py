"""Latent Dirichlet allocation of the AP corpus, with Gibbs draws of the topics of the words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt

from pymc_sgmcmc import SGLD, SGLDCV, SGRLD, LocalSampling

LARGEST_SHARE = 0.3
"""About this share of the occurrences of a word is in the topic that has most of them."""

ATTEMPTS = 3
"""Attempts of a draw from a Gamma law, each of which fails in less than one of twenty cases."""


@dataclass(frozen=True)
class Topics:
    """Counts of words in documents for training, and two halves of each other document.

    The concentrations are those of the topics in a document and of the words in a topic.
    """

    train: np.ndarray
    first: np.ndarray
    second: np.ndarray
    n_topics: int = 10
    alpha: float = 0.1
    beta: float = 0.1

    @classmethod
    def from_corpus(
        cls, folder: Path, *, words: int, documents: int | None = None, n_topics: int = 10
    ) -> Topics:
        """The most frequent words, four fifths of the documents for training."""
        with np.load(folder / "ap.npz", allow_pickle=True) as corpus:
            counts = np.zeros((int(corpus["doc"].max()) + 1, len(corpus["vocab"])), dtype=np.int64)
            np.add.at(counts, (corpus["doc"], corpus["word"]), corpus["count"])
        counts = counts[:, np.sort(np.argsort(-counts.sum(0))[:words])]
        counts = counts[counts.sum(1) > 20][:documents]
        rng = np.random.default_rng(1)
        counts = rng.permutation(counts)
        test, train = np.split(counts, [len(counts) // 5])
        first = rng.binomial(test, 0.5)
        return cls(train, first, test - first, n_topics)

    @property
    def shape(self) -> tuple[int, int]:
        """Topics and words."""
        return self.n_topics, self.train.shape[1]

    def model(self) -> pm.Model:
        """Topics as normalised Gamma variables, of which the logarithms are the position."""
        with pm.Model() as model:
            weights = pm.Gamma(
                "weights", self.beta, 1.0, shape=self.shape, initval=np.exp(self.start())
            )
            topics = weights / weights.sum(axis=1, keepdims=True)
            alpha = np.full(self.n_topics, self.alpha)
            theta = pm.Dirichlet("theta", alpha, shape=(len(self.train), self.n_topics))
            pm.Multinomial("counts", n=self.train.sum(1), p=theta @ topics, observed=self.train)
        return model

    def start(self) -> np.ndarray:
        """Logarithms of random weights about the frequencies of the words."""
        frequencies = (self.train.sum(0) + self.beta) / self.n_topics
        rng = np.random.default_rng(1)
        return np.log(rng.gamma(1.0, size=self.shape) * frequencies / 2)

    @cached_property
    def _words(self) -> tuple[np.ndarray, np.ndarray]:
        """The words of each document one by one, and which of them there are."""
        longest = int(self.train.sum(1).max())
        words = np.zeros((len(self.train), longest), dtype=np.int64)
        there = np.zeros(words.shape)
        for document, counts in enumerate(self.train):
            listed = np.repeat(np.arange(len(counts)), counts)
            words[document, : len(listed)] = listed
            there[document, : len(listed)] = 1
        return words, there

    def gibbs(self, transitions: int = 5, *, control_variates: bool = False) -> LocalSampling:
        """Draws of the topic of each word, and then of the topics of the document."""
        words, there = self._words
        longest, n_topics = words.shape[1], self.n_topics
        all_words = pytensor.shared(words, "words", shape=(None, longest))
        all_there = pytensor.shared(there, "there", shape=(None, longest))

        def uniform(normal):
            return 0.5 * pt.erfc(normal / np.sqrt(2))

        def transition(state):
            last = -state.block.sum(axis=1, keepdims=True)
            theta = pt.exp(pt.concatenate([state.block, last], axis=1))
            topics = state.variables["weights"]
            topics = topics / topics.sum(axis=1, keepdims=True)
            there = all_there[state.numbers]
            chances = theta[:, None, :] * topics.T[all_words[state.numbers]]
            cumulative = pt.cumsum(chances, axis=2)
            level = uniform(state.noise[:, :longest]) * cumulative[:, :, -1]
            # Words whose topic comes after each of the topics.
            after = ((level[:, :, None] > cumulative) * there[:, :, None]).sum(axis=1)
            before = pt.concatenate([there.sum(axis=1, keepdims=True), after[:, :-1]], axis=1)
            shape = before - after + self.alpha
            numbers = state.noise[:, longest:].reshape((-1, 2 * ATTEMPTS + 1, n_topics))
            logs = log_gamma_draw(shape, numbers)
            return (logs - logs.mean(axis=1, keepdims=True))[:, :-1]

        def log_gamma_draw(shape, numbers):
            """Logarithm of a draw by Marsaglia and Tsang (2000), of a shape raised by one."""
            d = shape + 1 - 1 / 3
            draw = d
            for attempt in range(ATTEMPTS):
                normal, level = numbers[:, 2 * attempt], uniform(numbers[:, 2 * attempt + 1])
                v = (1 + normal / pt.sqrt(9 * d)) ** 3
                bound = 0.5 * normal**2 + d - d * v + d * pt.log(pt.maximum(v, 1e-300))
                draw = pt.switch((v > 0) & (pt.log(level) < bound), d * v, draw)
            return pt.log(draw) + pt.log(uniform(numbers[:, -1])) / shape

        return LocalSampling(
            "theta",
            transitions=transitions,
            transition=transition,
            noise_size=longest + (2 * ATTEMPTS + 1) * n_topics,
            control_variates=control_variates,
        )

    def sample(
        self, sampler: str, *, draws: int, batch_size: int = 20, thin: int = 10
    ) -> Iterator[np.ndarray]:
        """Topics after each ten transitions.

        Control variates begin where plain gradients end. Plain steps are scaled by the numbers of
        words, since the logarithm of a weight of w words varies by about 1 / sqrt(w).
        """
        settings = {"gradient": self.gibbs(), "batch_size": batch_size, "thin": thin}
        settings |= {"step_size": 0.03}
        with self.model():
            if sampler == "sgrld":
                # A metric of Patterson and Teh that is bounded where a weight is near zero.
                step = SGRLD(metric=lambda x: 1 / (1 + pt.exp(x)), **settings)
            else:
                weights = LARGEST_SHARE * (self.train.sum(0) + self.beta)
                settings["preconditioner"] = np.tile(1 / (1 + weights), self.n_topics)
                step = SGLD(**settings)
            if sampler == "sgldcv":
                *_, last = self._positions(step, draws)
                settings["gradient"] = self.gibbs(control_variates=True)
                step = SGLDCV(center={"weights_log__": last.reshape(self.shape)}, **settings)
        for position in self._positions(step, draws):
            yield normalised(position, self.shape)

    @staticmethod
    def _positions(step, draws: int) -> Iterator[np.ndarray]:
        # The chain alone, since a trace would hold the topics of all documents in each draw.
        center = step.center
        start = step.posterior.initial_position if center is None else center.position
        step.chain.begin(np.random.default_rng(1), start)
        for _ in range(draws):
            yield step.chain.advance(1).positions[-1]

    def perplexity(self, topics: list[np.ndarray]) -> float:
        """Perplexity of the second halves of the other documents, given the first halves.

        It is that of the mean prediction over several draws of the topics.
        """
        chances = np.mean([self._fold_in(each) @ each for each in topics], axis=0)
        return float(np.exp(-(self.second * np.log(chances)).sum() / self.second.sum()))

    def _fold_in(self, topics: np.ndarray, rounds: int = 60) -> np.ndarray:
        theta = np.full((len(self.first), self.n_topics), 1 / self.n_topics)
        for _ in range(rounds):
            chances = np.maximum(theta @ topics, 1e-300)
            theta = (self.first / chances) @ topics.T * theta + self.alpha
            theta /= theta.sum(axis=1, keepdims=True)
        return theta

    def variational(self) -> float:
        """Perplexity of scikit-learn's variational Bayes on the same documents."""
        from sklearn.decomposition import LatentDirichletAllocation

        fitted = LatentDirichletAllocation(
            self.n_topics,
            doc_topic_prior=self.alpha,
            topic_word_prior=self.beta,
            max_iter=100,
            random_state=1,
        ).fit(self.train)
        components = fitted.components_
        return self.perplexity([components / components.sum(axis=1, keepdims=True)])


def normalised(position: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Topics of a position of logarithms of weights."""
    weights = np.exp(position.reshape(shape))
    return weights / weights.sum(axis=1, keepdims=True)
