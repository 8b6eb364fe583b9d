"""Turns as token ids: each is rendered once with the tokenizer's chat template, and never again.

A template renders a whole conversation. Rendering it again at each turn would re-tokenize what the model sampled. So
only the *suffix* that follows an assistant's turn is rendered: the text after a marker that takes the place of the
assistant's text in a small conversation. This works for every template that concatenates turns (ChatML, Llama 3,
Mistral, DeepSeek …).

Tokens can differ from those of the whole text tokenized at once only where an answer starts: white space at the end of
the prompt is not merged with the model's text. A server gets the prompt in exactly this form.

Text from a sandbox may contain the spelling of a special token. Each is rendered as a placeholder and then encoded as
plain text, so that no output can end a turn or start another. Placeholders and the marker have a random key, new for
each rendering, so that text can't imitate them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from atropos.agent.transcript import Message
from atropos.errors import ConfigError
from atropos.thinking import opening_of
from atropos.tools.arguments import replace_surrogates

Tokenizer = Any
"""A Hugging Face tokenizer with a chat template; transformers declares no types for what is used of it."""

PROMPTS_KEPT = 256
"""Opening prompts cached by a renderer."""


class TurnRenderer:
    """Renders prompts and suffixes with one tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        tools: OpenAI schemas for the template itself; None where the system prompt describes the tools.

    Raises:
        ConfigError: the tokenizer has no chat template, or one that can't be continued turn by turn.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, object]] | None = None) -> None:
        self._tokenizer = tokenizer
        self._cached_prompt = lru_cache(PROMPTS_KEPT)(self._text_prompt)
        self._tools = [dict(tool) for tool in tools] if tools else None
        special = _special_tokens(tokenizer)
        self._special_pattern = re.compile("|".join(map(re.escape, special))) if special else None
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "tokenizer_name: this tokenizer has no chat template; name the instruct model's tokenizer instead"
            )
        # At the start: a template that can't be continued shows here, and not in the first trajectory.
        suffix = self.following([{"role": "user", "content": "x"}])
        if not suffix:
            raise ConfigError("tokenizer_name: its chat template renders nothing after an assistant's turn")
        self.end_id = suffix[0]
        """The token that closes an assistant's turn."""
        self.end_text = str(tokenizer.decode([self.end_id]))
        eos: int | None = getattr(tokenizer, "eos_token_id", None)
        # Some models close a turn with `eos`, others with a token of the template's, and some with either.
        self.end_ids = {self.end_id} if eos is None else {self.end_id, eos}
        closing = {*self.end_ids, *self._after_a_call()}
        self.stop_ids = frozenset(token for token in closing if str(tokenizer.decode([token])) in special)
        """Special tokens after which nothing of the turn comes, so that a server can be asked to stop there."""
        self.end_ids |= self.stop_ids
        self.thinking_opening = opening_of(self._apply([{"role": "user", "content": "x"}]))
        """What the prompt already has of the turn's thinking: `<think>`, which the model then doesn't write; or
        empty."""

    def _after_a_call(self) -> list[int]:
        """The token after a turn with a call.

        GLM's template closes no turn, so its models sample the next one's opening.
        """
        try:
            return self.following([{"role": "tool", "tool_call_id": "a", "name": "t", "content": "x"}])[:1]
        except Exception:  # templates may raise any error
            return []

    def prompt(self, messages: Sequence[Mapping[str, object]]) -> list[int]:
        """Ids of the opening messages, up to where the assistant begins. A group's members share them."""
        if all(isinstance(value, str) for message in messages for value in message.values()):
            return list(self._cached_prompt(*(tuple(message.items()) for message in messages)))
        return self._encode(messages, after=None)

    def _text_prompt(self, *messages: tuple[tuple[str, object], ...]) -> list[int]:
        return self._encode([dict(message) for message in messages], after=None)

    def following(self, messages: Sequence[Mapping[str, object]], sampled: Sequence[int] = ()) -> list[int]:
        """Ids between the assistant's last sampled token and its next turn, with `messages` between.

        Args:
            messages: the messages between the two turns.
            sampled: the turn's ids. A turn that they already close isn't closed again.
        """
        mark = _key()
        opening = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
        ids = self._encode([*opening, *messages], after=mark)
        # A turn that was cut off has no such token, and gets one.
        return ids[1:] if sampled and ids and sampled[-1] == ids[0] else ids

    def encode_text(self, text: str) -> list[int]:
        """Plain text as ids; the spelling of a special token stays text."""
        # Only where it has to be: `split_special_tokens` takes the slower of the tokenizers' paths.
        hostile = self._special_pattern is not None and self._special_pattern.search(text) is not None
        options: dict[str, object] = {"split_special_tokens": True} if hostile else {}
        return list(self._tokenizer(text, add_special_tokens=False, **options)["input_ids"])

    def placeholder(self, text: str) -> list[int]:
        """Ids of a turn for a server that doesn't report them."""
        return [*self.encode_text(text), self.end_id]

    def text(self, ids: Sequence[int]) -> str:
        """The model's text, without the token that ended its turn."""
        shown = list(ids[:-1]) if ids and ids[-1] in self.end_ids else list(ids)
        return str(self._tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def whole_turn(self, text: str) -> str:
        """A turn with the opening of its thinking, where the template wrote it."""
        return self.thinking_opening + text

    def whole_answer(self, text: str) -> str:
        """The same for text from a server, which may have parsed the thinking out of it."""
        return self.whole_turn(text) if "</think>" in text and "<think>" not in text else text

    def _encode(self, messages: Sequence[Mapping[str, object]], after: str | None) -> list[int]:
        key = _key()
        spellings: list[str] = []

        def placeholder(match: re.Match[str]) -> str:
            spellings.append(match[0])
            return f"{key}n{len(spellings) - 1}e"

        text = self._apply([self._replaced(replace_surrogates(dict(message)), placeholder) for message in messages])
        if after is not None:
            # The first one: the key is random, so that no message can hold it.
            _, separator, text = text.partition(after)
            if not separator:
                raise ConfigError(
                    "tokenizer_name: its chat template changes an assistant's text; it can't be continued"
                )
        ids: list[int] = []
        for index, part in enumerate(re.split(f"{key}n(\\d+)e", text) if spellings else [text]):
            if index % 2:  # what the pattern's group matched
                ids.extend(self.encode_text(spellings[int(part)]))
            elif part:
                ids.extend(self._tokenizer(part, add_special_tokens=False)["input_ids"])
        return ids

    def _replaced(self, message: Message, placeholder: Callable[[re.Match[str]], str]) -> Message:
        """The message with every special token's spelling in its texts replaced."""
        pattern = self._special_pattern
        if pattern is None:
            return message
        return {
            name: pattern.sub(placeholder, value) if isinstance(value, str) and name != "role" else value
            for name, value in message.items()
        }

    def _apply(self, messages: list[Message]) -> str:
        options: dict[str, object] = {"tools": self._tools} if self._tools else {}
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))


def _key() -> str:
    """Unguessable text of characters that no template changes."""
    return f"k{secrets.token_hex(12)}"


def _special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Spellings of every special token, longest first."""
    spellings: set[str] = set(getattr(tokenizer, "all_special_tokens", ()))
    added: Mapping[int, object] = getattr(tokenizer, "added_tokens_decoder", {})
    spellings.update(str(token) for token in added.values() if getattr(token, "special", False))
    return sorted((text for text in spellings if text), key=lambda text: -len(text))
