"""Text to ids: `tokenizers` is the reference, and a faster encoder is used where it gives the same ids.

Owns which encoder works and the special tokens around a document. Never reads sources and never writes shards.
Ids move as flat numpy arrays; only the reference makes Python integers.
"""

import json
import logging
import os
import random
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from trainer.data.shards import token_dtype
from trainer.errors import DataError

logger = logging.getLogger("forgeline")

CANARY = "Zoë’s naïve 🦊 said: “x²≠١٢٣”\t<|endoftext|>\r\n  if a[0]==None:\u00a0pass  # 中文 e\u0301 \x00 1234567890"
AWKWARD = [
    CANARY,
    "<|endoftext|>",
    "a<|endoftext|><|endoftext|> b <|endoftext|",
    "",
    " ",
    "\n",
    "\x00",
    "\x00\x01\x1b[0m\x7f\r\n\t  \u00a0\u2028\u0085 trailing ",
    "\r\n\r\n \r x\r\n",
    "e\u0301 é ﬁ Å a\u0300\u0315\u0301\u0328",
    "🏳️‍🌈👩‍👩‍👧‍👦🦊👍🏽 मनीष 한국어 日本語テキスト 中文字符 العربية עברית ไทย 𝔘𝔫𝔦",
    "\u200b\u200d\ufeff\ufffd\ud7ff\ue000\U0010ffff",
    "I'M i'm DON'T we'll they'Ve 'S x's",
    "1 12 123 1234 12345678901234567890 ½ ² ١٢٣ ⅷ",
    "    if x:\n\t\treturn  {'a':[1,2]}  # ----====////....\n\n\n",
    "http://example.com/a?b=c&d=%20#e  CamelCaseWordsAndSNAKE_CASE",
    "a" * 3000,
    " " * 3000,
    "ab" * 1500,
    "\n" * 700 + " \n" * 500,
    "🦊" * 400,
    "é" * 700,
    "0" * 1500,
    "-" * 1500,
]
"""Texts on which encoders differ first: emoji, combining marks, CJK, control characters, NUL, CRLF, special-token
strings, contractions and long runs."""
_CACHE_BYTES = 64 * 2**20
"""Growth in its calls after which the fast encoder is loaded anew: its cache of words has no bound of its own."""

Flat = tuple[np.ndarray, np.ndarray]
"""The ids of several texts, one after the other (uint32), and the number of ids of each (int64)."""


class Tokenization:
    """A tokenizer directory as the tokenize stage uses it.

    The text of a document is never a control token, even where it spells one.
    """

    def __init__(self, directory: Path, fast: bool) -> None:
        """Load `tokenizer.json` and `tokenizer_config.json`.

        Args:
            fast: use the encoder that :func:`fast_encoder_agrees` has found to be right.

        Raises:
            DataError: its end-of-text token is not in its vocabulary.
        """
        self.serialized = (directory / "tokenizer.json").read_text(encoding="utf-8")
        self.settings: dict[str, Any] = orjson.loads(self.serialized)
        end = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))["eos_token"]
        self.end_token: str = end if isinstance(end, str) else end["content"]
        vocabulary = self._vocabulary()
        if self.end_token not in vocabulary:
            raise DataError(f"{directory}: its end-of-text token {self.end_token!r} is not in its vocabulary.")
        self.end_id = vocabulary[self.end_token]
        self.vocabulary_size = max(vocabulary.values()) + 1  # some vocabularies have gaps
        self.beginning_id, self.beginning_token = self._beginning()
        self._encode = self.fast_encoder() if fast else self._by_reference

    def _vocabulary(self) -> dict[str, int]:
        """Every token and its id, without the reference, which is slow to load, where the model maps them."""
        found = self.settings["model"].get("vocab")
        if not isinstance(found, dict):
            return self.reference.get_vocab(with_added_tokens=True)
        return {**found, **{token["content"]: token["id"] for token in self.settings.get("added_tokens") or []}}

    @cached_property
    def reference(self) -> Any:
        """The `tokenizers` tokenizer, without truncation, padding and special tokens in text."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self.serialized)
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    def _beginning(self) -> tuple[int | None, str | None]:
        """The token that the tokenizer's own template puts before a text, which its model then expects."""
        if (self.settings.get("post_processor") or {"type": "ByteLevel"})["type"] == "ByteLevel":  # adds no token
            return None, None
        plain = self.reference.encode("a", add_special_tokens=False).ids
        whole = self.reference.encode("a", add_special_tokens=True).ids
        # where it is the end-of-text token, that of the document before already stands there
        if plain and whole[0] not in (plain[0], self.end_id):
            return whole[0], self.reference.id_to_token(whole[0])
        return None, None

    def encode(self, texts: list[str]) -> Flat:
        """The ids of the texts, without tokens around them."""
        return self._encode(texts)

    def documents(self, texts: list[str], begins: np.ndarray, ends: np.ndarray) -> Flat:
        """The ids of texts as rows of a shard, in the type of the shard.

        Args:
            begins: whether each text begins its document, and so has the beginning token before it, if there is one.
            ends: whether each text ends its document, and so has the end-of-text token after it.
        """
        ids, lengths = self.encode(texts)
        if len(ids) and ids.max() >= self.vocabulary_size:
            raise DataError(f"id {ids.max()} does not fit a vocabulary of {self.vocabulary_size} entries.")
        before = begins.astype(np.int64) * (self.beginning_id is not None)
        rows = before + lengths + ends
        after = np.cumsum(rows)
        out = np.empty(after[-1] if len(rows) else 0, token_dtype(self.vocabulary_size))
        is_text = np.ones(len(out), bool)
        first, last = (after - rows)[before > 0], after[ends] - 1
        is_text[first] = is_text[last] = False
        out[is_text] = ids
        if self.beginning_id is not None:
            out[first] = self.beginning_id
        out[last] = self.end_id
        return out, rows

    def canary(self) -> dict[str, Any]:
        """A fixed awkward text and its ids; of the vocabulary's own characters where it lacks some of the text's."""
        try:
            return {"text": CANARY, "ids": self.reference.encode(CANARY, add_special_tokens=False).ids}
        except Exception:  # tokenizers raises plain Exception
            text = "".join(symbol for symbol in sorted(self.reference.get_vocab()) if len(symbol) == 1)
            return {"text": text, "ids": self.reference.encode(text, add_special_tokens=False).ids}

    def _by_reference(self, texts: list[str]) -> Flat:
        encodings = self.reference.encode_batch_fast(texts, add_special_tokens=False)
        lengths = np.fromiter((len(encoding) for encoding in encodings), np.int64, len(encodings))
        ids = np.empty(lengths.sum(), np.uint32)
        place = 0
        for encoding in encodings:
            ids[place : place + len(encoding)] = encoding.ids
            place += len(encoding)
        return ids, lengths

    def fast_encoder(self) -> Callable[[list[str]], Flat]:
        """A new encoder that is faster than the reference; whether it gives the same ids is not known here."""
        settings = self.settings
        if settings["model"]["type"] == "BPE" and not settings["model"].get("merges"):
            return _byte_table(settings)
        if settings["model"]["type"] == "WordLevel":
            return _character_table(settings)
        return _Gigatoken(settings)


def _byte_table(settings: dict[str, Any]) -> Callable[[list[str]], Flat]:
    """An encoder for vocabularies of single bytes."""
    symbols = _byte_symbols()
    table = np.array([settings["model"]["vocab"][symbols[byte]] for byte in range(256)], np.uint32)

    def encode(texts: list[str]) -> Flat:
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter((len(text) for text in encoded), np.int64, len(encoded))
        return table[np.frombuffer(b"".join(encoded), np.uint8)], lengths

    return encode


def _byte_symbols() -> dict[int, str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + n) for n, byte in enumerate(hidden)}}


def _character_table(settings: dict[str, Any]) -> Callable[[list[str]], Flat]:
    """An encoder for vocabularies of single characters."""
    known = {ord(symbol): number for symbol, number in settings["model"]["vocab"].items() if len(symbol) == 1}
    table = np.full(0x110000, -1, np.int64)
    table[list(known)] = list(known.values())

    def encode(texts: list[str]) -> Flat:
        points = np.frombuffer("".join(texts).encode("utf-32-le"), "<u4")
        ids = table[points]
        if len(ids) and ids.min() < 0:
            raise DataError(f"the vocabulary lacks the character {chr(points[int(ids.argmin())])!r}")
        return ids.astype(np.uint32), np.fromiter((len(text) for text in texts), np.int64, len(texts))

    return encode


class _Gigatoken:
    """gigatoken's encoder; its cache stays warm from call to call until it has grown too large."""

    def __init__(self, settings: dict[str, Any]) -> None:
        # it takes special tokens in text for control tokens, unless it does not know them
        added = [token for token in settings.get("added_tokens") or [] if not token["special"]]
        self._serialized = orjson.dumps({**settings, "added_tokens": added})
        self._load()

    def _load(self) -> None:
        from gigatoken import Tokenizer

        self._backend = Tokenizer.from_json(self._serialized).backend
        self._grown = 0

    def __call__(self, texts: list[str]) -> Flat:
        before = _resident_bytes()
        # one by one: its batches come as arrays of another library, which takes longer to import than this costs
        ids = [self._backend.encode(text) for text in texts]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        flat = np.concatenate([np.empty(0, np.uint32), *ids])
        self._grown += max(0, _resident_bytes() - before - 2 * flat.nbytes)
        if self._grown > _CACHE_BYTES:
            self._load()
        return flat, lengths


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def fast_encoder_agrees(reference: Tokenization, sample: list[str]) -> dict[str, Any]:
    """Which encoder may be used: the fast one only where its ids are the reference's on every text of a probe.

    Args:
        reference: the tokenizer, without its fast encoder.
        sample: texts of the very input; the awkward ones are added here.

    Returns:
        `fast`, the `name` of the encoder with its version, and `why`.
    """
    slow = {"fast": False, "name": f"tokenizers {version('tokenizers')}"}
    try:
        fast = reference.fast_encoder()
    except BaseException as error:  # a panic in Rust is no Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return {**slow, "why": f"the fast encoder cannot load this tokenizer ({str(error).strip().splitlines()[0]})"}
    probe = [*AWKWARD, *sample, *(text[::-1] for text in sample[:8])]
    probe += ["".join(random.Random(number).sample(AWKWARD, 3)) for number in range(8)]
    for text in probe:
        try:
            expected = reference.encode([text])[0]
        except Exception:  # a character that the vocabulary lacks; both refuse it
            continue
        try:
            same = np.array_equal(expected, fast([text])[0])
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            same = False
        if not same:
            return {**slow, "why": f"the fast encoder gives other ids for {text[:60]!r}"}
    name = "table" if not isinstance(fast, _Gigatoken) else f"gigatoken {version('gigatoken')}"
    return {"fast": True, "name": name, "why": f"same ids as {slow['name']} on a probe of {len(probe)} texts"}
