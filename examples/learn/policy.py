"""A softmax policy over the tokens of `examples/policy/tokenizer`, small enough to be trained on a CPU in a minute.

At every place of a turn the policy draws one token from a softmax over those that its grammar allows there (guided
decoding, as inference servers offer it: a turn is one of a set of tool calls). The logits are linear: a weight for each
pair of a place in the grammar and a token, and one for a token that begins a word which the task, or the last message,
has mentioned (a copying head). All are zero at first and stand in one hashed vector: the policy chooses at random, and
that it is good to call a tool, to look first, and to copy what was seen, are things that it has to learn.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from examples.policy.tokenizer import FOLDER, IM_END, IM_START

WEIGHTS = 1 << 16
"""Length of the hashed weight vector."""
_WORD = re.compile(r"[a-z]+")


@dataclass
class Node:
    """A state of the grammar with the tokens that may follow. `number` is unique in its grammar."""

    number: int
    following: dict[int, Node] = field(default_factory=dict[int, "Node"])


class Grammar:
    """The texts that each turn may have, as tries of token ids.

    Args:
        turns: for the first turn, the second, and so on, every text that is allowed; the last holds for all later ones.
        words: those that the policy notices when a message mentions them.
    """

    def __init__(self, turns: Sequence[Sequence[str]], words: Sequence[str]) -> None:
        self.tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self.start_id = self.tokenizer.token_to_id(IM_START)
        self.end_id = self.tokenizer.token_to_id(IM_END)
        self.header = self.encode("assistant\n")
        self.words = {word: frozenset(self.encode(before + word)[0] for before in ("", " ")) for word in words}
        self.starts = frozenset[int]().union(*self.words.values())
        if len(self.starts) < sum(map(len, self.words.values())):
            raise ValueError("words: two of them begin with the same token; choose others")
        self._nodes = 0
        self.roots = [self._trie(texts) for texts in turns]

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def mentioned(self, ids: Sequence[int]) -> frozenset[int]:
        """The first tokens of those words in a message that the policy notices."""
        heard = set(_WORD.findall(self.tokenizer.decode(list(ids))))
        return frozenset[int]().union(*(tokens for word, tokens in self.words.items() if word in heard))

    def root(self, turn: int) -> Node:
        """The first state of a turn, counted from 0."""
        return self.roots[min(turn, len(self.roots) - 1)]

    def _trie(self, texts: Sequence[str]) -> Node:
        root = self._node()
        for text in texts:
            node = root
            for token in [*self.encode(text), self.end_id]:
                node = node.following.setdefault(token, self._node())
        return root

    def _node(self) -> Node:
        self._nodes += 1
        return Node(self._nodes)


@dataclass(frozen=True)
class Place:
    """The context of a choice: the turn, the state in it, the possible tokens, and the words mentioned so far.

    Attributes:
        mentioned: by the task and by the last message: tokens that begin a word there.
    """

    turn: int
    node: int
    choices: tuple[int, ...]
    mentioned: tuple[frozenset[int], frozenset[int]]
    words: frozenset[int]


class Reader:
    """Follows a conversation token by token; `place()` is where its next token would be chosen, None outside turns."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._message: list[int] | None = None
        self._speaking = False
        self._task: frozenset[int] | None = None
        self._last: frozenset[int] = frozenset()
        self._node: Node | None = None
        self.turn = -1

    def read(self, token: int) -> None:
        """Advance by one token."""
        grammar = self._grammar
        if token == grammar.start_id:
            self._message, self._speaking, self._node = [], False, None
        elif self._message is None:
            return
        elif self._speaking:
            self._node = self._node.following.get(token) if self._node else None
            if token == grammar.end_id:
                self._message = self._node = None
        elif token == grammar.end_id:
            self._hear(self._message)
            self._message = None
        else:
            self._message.append(token)
            if self._message == grammar.header:
                self._speaking = True
                self.turn += 1
                self._node = grammar.root(self.turn)

    def place(self) -> Place | None:
        """Where the next token is chosen."""
        if self._node is None or not self._node.following:
            return None
        choices = tuple(self._node.following)
        return Place(
            self.turn, self._node.number, choices, (self._task or frozenset(), self._last), self._grammar.starts
        )

    def _hear(self, message: list[int]) -> None:
        if self._grammar.tokenizer.decode(message[:4]).startswith("system"):
            return
        self._last = self._grammar.mentioned(message)
        if self._task is None:
            self._task = self._last


class Policy:
    """The weights, and the probabilities that they give."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.weights = np.zeros(WEIGHTS)

    def probabilities(self, place: Place, temperature: float) -> Any:
        """The probability of each of the place's choices."""
        logits = self.weights[rows(place)].sum(axis=1) / temperature
        raised = np.exp(logits - logits.max())
        return raised / raised.sum()

    def sample(
        self, prompt: Sequence[int], rng: random.Random, limit: int | None, temperature: float
    ) -> tuple[list[int], list[float], str]:
        """Sample one turn: its tokens, their logprobs at this temperature, and the finish reason."""
        reader = Reader(self.grammar)
        for token in prompt:
            reader.read(token)
        ids: list[int] = []
        logprobs: list[float] = []
        while limit is None or len(ids) < limit:
            place = reader.place()
            if place is None:
                if not ids:
                    raise ValueError("the prompt does not end where an assistant begins")
                return ids, logprobs, "stop"
            chances = self.probabilities(place, temperature) if len(place.choices) > 1 else np.ones(1)
            drawn = rng.choices(range(len(place.choices)), weights=chances.tolist())[0]
            ids.append(place.choices[drawn])
            logprobs.append(math.log(chances[drawn]))
            reader.read(ids[-1])
        return ids, logprobs, "length"

    def copy(self) -> Policy:
        """The policy as it is now."""
        found = Policy(self.grammar)
        found.weights = self.weights.copy()
        return found

    def drew(self, place: Place | None, token: int, logprob: float, temperature: float) -> bool:
        """Whether a token's logprob at a place is this policy's."""
        if place is None or token not in place.choices:
            return False
        chances = self.probabilities(place, temperature)
        return math.isclose(math.log(chances[place.choices.index(token)]), logprob, abs_tol=1e-9)

    def places(self, tokens: Sequence[int]) -> Iterator[Place | None]:
        """The place of each token of a sequence and of the next one, by the tokens before it."""
        reader = Reader(self.grammar)
        for token in tokens:
            yield reader.place()
            reader.read(token)
        yield reader.place()


def rows(place: Place) -> Any:
    """Indices into the weights: a row a choice; 0, whose weight stays 0, stands for a feature that a choice lacks."""
    found: list[list[int]] = []
    for token in place.choices:
        copies = [_index(place.turn, source) if token in place.mentioned[source] else 0 for source in (0, 1)]
        found.append([0 if token in place.words else _index(place.turn, place.node, token), *copies])
    return np.array(found)


def _index(*feature: int) -> int:
    return 1 + hash(feature) % (WEIGHTS - 1)
