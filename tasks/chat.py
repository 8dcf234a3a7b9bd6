"""Chat data: conversations rendered by the tokenizer's chat template, with marks at the answers, which are trained.

Owns what a conversation is and how it becomes ids. Never reads sources and never writes shards.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tasks.encoding import Tokenization
from tasks.reading import PRIVATE_USE, Document
from trainer.data.shards import ANSWER, BEGINNING, token_dtype
from trainer.errors import ConfigError

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Conversation(Document):
    """A conversation as it is trained: one document, encoded.

    Its text is what the template made of it; special tokens that a message spells are private-use characters in it.
    """

    ids: np.ndarray
    """Ids with the end-of-text token last, in the type of the shards; shape [tokens]."""
    marks: np.ndarray
    """uint8, shape [tokens]; see `trainer.data.shards`."""
    answer_bytes: int
    """UTF-8 bytes of the answers."""


def chat_template(tokenizer: Any) -> str:
    """The chat template of a transformers tokenizer.

    Raises:
        ConfigError: it has none.
    """
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise ConfigError(
            "data.messages_field: the tokenizer has no chat template. Use the tokenizer of a chat model "
            "(data.tokenizer: {type: pretrained, path: …}), or put a chat_template.jinja into its directory."
        ) from None


class ChatEncoder:
    """Turns conversations into ids and marks.

    The template's special tokens are control tokens; what a message spells is always plain text.
    """

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer of a directory.

        Raises:
            ConfigError: it has no chat template.
        """
        from trainer.model import load_tokenizer

        tokenizer = load_tokenizer(directory)
        self._template = chat_template(tokenizer)
        self._named = tokenizer.special_tokens_map
        self._tokenization = Tokenization(directory, fast=False)
        special = [token for token in self._tokenization.settings.get("added_tokens") or [] if token["special"]]
        self._ids = {token["content"]: token["id"] for token in special}
        self._stand_ins = {text: chr(PRIVATE_USE + number) for number, text in enumerate(self._ids)}
        self._spelled = {character: text for text, character in self._stand_ins.items()}
        longest_first = sorted(map(re.escape, self._ids), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first) or "(?!)")

    @cached_property
    def _with_control_tokens(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self._tokenization.serialized)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def conversation(self, name: str, messages: list[dict[str, str]]) -> Conversation:
        """Messages as a document.

        Args:
            messages: from :func:`tasks.reading.messages_of`.

        Raises:
            ValueError: why they cannot be one.
        """
        messages = [
            {**message, "content": self._special.sub(lambda found: self._stand_ins[found[0]], message["content"])}
            for message in messages
        ]
        text, answers = self._rendered(messages)
        if not _MARKERS.search(self._template):
            answers = self._answers(messages, text)
        ids, starts = self._encoded(text)
        marks = np.zeros(len(ids) + 1, np.uint8)  # none at the end-of-text token: the template ends answers itself
        for start, stop in answers:
            marks[:-1][(starts >= start) & (starts < stop)] = ANSWER
        if not marks.any():
            raise ValueError("has no answer of an assistant")
        marks[0] |= BEGINNING
        size = sum(len(self._plain(text[start:stop]).encode()) for start, stop in answers)
        out = np.array([*ids, self._tokenization.end_id], token_dtype(self._tokenization.vocabulary_size))
        return Conversation(name, text, out, marks, size)

    def _rendered(self, messages: list[dict[str, str]], prompt: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """The rendered text, and where the answers are in it, in characters, if the template says that."""
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template  # it says that it returns a string
        try:
            texts, answers = render(
                [messages],
                chat_template=self._template,
                return_assistant_tokens_mask=bool(_MARKERS.search(self._template)),
                add_generation_prompt=prompt,
                **self._named,
            )
        except Exception as error:  # whatever a template raises
            raise ValueError(f"is refused by the chat template: {error}") from None
        return texts[0], answers[0] if answers else []

    def _answers(self, messages: list[dict[str, str]], text: str) -> list[tuple[int, int]]:
        """Where the answers are, from a template without generation markers.

        An answer is what the text gains over the messages before it with the prompt for an answer. That holds where
        each rendering is the beginning of the next, which is checked.
        """
        answers = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before, _ = self._rendered(messages[:number], prompt=True)
                after, _ = self._rendered(messages[: number + 1])
                if not (after.startswith(before) and text.startswith(after)):
                    raise ValueError(
                        f"message {number + 1} is rendered otherwise as an answer than in the whole conversation; "
                        "a chat template with {% generation %} markers is needed"
                    )
                answers.append((len(before), len(after)))
        return answers

    def _encoded(self, text: str) -> tuple[list[int], np.ndarray]:
        """The ids of a rendered text, and the character of it at which each begins."""
        encoding = self._with_control_tokens.encode(text, add_special_tokens=False)
        if not any(character in self._spelled for character in set(text)):
            return encoding.ids, np.array([start for start, _ in encoding.offsets], np.int64)
        # some tokenizers begin a text otherwise than they go on after a control token
        masked = dict.fromkeys(self._spelled, "?")
        whole = self._with_control_tokens.encode(self._replaced(text, masked), add_special_tokens=False)
        if self._by_segments(text, masked)[0] != whole.ids:
            raise ValueError("spells a control token, which this tokenizer cannot keep as text")
        return self._by_segments(text, self._spelled)

    def _by_segments(self, text: str, replaced: dict[str, str]) -> tuple[list[int], np.ndarray]:
        """The same, with the text between the template's control tokens encoded as plain text."""
        ids: list[int] = []
        starts: list[int] = []
        place = 0
        for control in [*self._special.finditer(text), None]:
            segment = text[place : control.start() if control else len(text)]
            pieces = [replaced.get(character, character) for character in segment]
            origin = np.repeat(np.arange(place, place + len(segment)), [len(piece) for piece in pieces]).tolist()
            encoding = self._tokenization.reference.encode("".join(pieces), add_special_tokens=False)
            ids += encoding.ids
            starts += [origin[start] for start, _ in encoding.offsets]
            if control:
                ids.append(self._ids[control[0]])
                starts.append(control.start())
                place = control.end()
        return ids, np.array(starts, np.int64)

    def _replaced(self, text: str, replaced: dict[str, str]) -> str:
        return text.translate({ord(character): new for character, new in replaced.items()})

    def _plain(self, text: str) -> str:
        """The text with what it spells in place of the stand-ins."""
        return self._replaced(text, self._spelled)
