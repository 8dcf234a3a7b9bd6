"""The tokenizer stage: trains a tokenizer on the sources, or takes one, and keeps it as transformers loads it."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from prefect import task
from pydantic import model_validator

from tasks.home import Home, content_of
from tasks.progress import Progress, Watcher, current_watcher
from tasks.reading import Reading, read_documents, text_digest, text_share
from tasks.records import BadRecord
from tasks.sources import SourceFile
from tasks.stage import Reference, build_once, shown, timed
from trainer.errors import ConfigError, DataError
from trainer.settings import ShortSettings, fingerprint

logger = logging.getLogger("forgeline")

FORMAT_VERSION = 2
END_OF_TEXT = "<|endoftext|>"
_PIECE_CHARACTERS = 2**16
"""Length of the pieces of a large document, of which a part is drawn for training."""
_TOKENIZER_FILES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")


class TokenizerConfig(ShortSettings):
    """The tokenizer. A plain string is short for `type`, or for `path` where it is no type."""

    type: Literal["bpe", "byte", "char", "pretrained"] = "bpe"
    """bpe (byte-level, trained on the sources), byte, char (one id a character of the sources), or pretrained."""
    vocabulary_size: Annotated[int, Ge(257)] = 8192
    """Entries of a bpe vocabulary, the end-of-text token included."""
    training_bytes: Annotated[int, Ge(1)] = 64 * 2**20
    """Most bytes of text that a bpe vocabulary is trained on: documents drawn evenly by their hash."""
    path: str | None = None
    """A `tokenizer.json`, a directory, or a hub name, for pretrained."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"type": value} if value in ("bpe", "byte", "char") else {"type": "pretrained", "path": value}
        return value

    @model_validator(mode="after")
    def _path_if_pretrained(self) -> "TokenizerConfig":
        if (self.type == "pretrained") != (self.path is not None):
            raise ValueError("path: set it for type: pretrained, and only then")
        return self


@timed
def build_tokenizer(home: Home, config: TokenizerConfig, reading: Reading, files: list[SourceFile]) -> Reference:
    """Train or take the tokenizer; `HOME/tokenizers/<fingerprint>/` holds it for `AutoTokenizer.from_pretrained`.

    Raises:
        ConfigError: the vocabulary is larger than the text supports, or a pretrained one cannot be used.
    """
    trained_on = [] if config.type in ("byte", "pretrained") else [file.identity() for file in files]
    content = (
        content_of(home, config.path or "", _TOKENIZER_FILES) if config.type == "pretrained" else config.identity()
    )
    if config.type != "bpe":
        content = {key: value for key, value in content.items() if key not in ("vocabulary_size", "training_bytes")}
    name = fingerprint(
        "tokenizer",
        FORMAT_VERSION,
        config=content,
        reading=reading.identity() if trained_on else None,
        files=trained_on,
    )

    def build(directory: Path) -> dict[str, Any]:
        from transformers import PreTrainedTokenizerFast

        if config.type == "pretrained":
            tokenizer = load_pretrained(config)
        else:
            makers = {"bpe": _bpe, "byte": lambda *_: _byte(), "char": _char}
            tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=makers[config.type](config, reading, files),
                eos_token=END_OF_TEXT,
                clean_up_tokenization_spaces=False,
            )
        tokenizer.save_pretrained(directory)
        return {"kind": "tokenizer", "fingerprint": name, "type": config.type, "vocabulary_size": len(tokenizer)}

    path, cached = build_once(home, "tokenizers", name, build)
    return Reference(path=path, fingerprint=name, cached=cached)


def _documents(files: list[SourceFile], reading: Reading, limit: int, watch: Watcher) -> Iterator[str]:
    """The documents' texts, thinned out evenly by their hash to about ``limit`` bytes."""
    share = min(1.0, limit / max(1, sum(file.size for file in files)))
    taken = 0
    for number, file in enumerate(files):
        for item in read_documents(file, reading):
            if isinstance(item, BadRecord) or taken >= 2 * limit:
                continue
            whole = item.characters <= limit // 16
            if whole and text_share(item.digest(), "tokenizer") >= share:
                continue
            for place, piece in enumerate(item.pieces() if whole else _short_pieces(item.pieces())):
                drawn = whole or text_share(text_digest(f"{item.digest().hex()}:{place}"), "tokenizer") < share
                if drawn and taken < 2 * limit:
                    taken += len(piece)
                    yield piece
        watch(Progress("tokenizer", number + 1, len(files), "files"))


def _short_pieces(pieces: Iterator[str]) -> Iterator[str]:
    """A text in pieces so short that a part of them is a fair part of it."""
    for piece in pieces:
        for start in range(0, len(piece), _PIECE_CHARACTERS):
            yield piece[start : start + _PIECE_CHARACTERS]


def _bpe(config: TokenizerConfig, reading: Reading, files: list[SourceFile]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocabulary_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_documents(files, reading, config.training_bytes, current_watcher()), trainer)
    size = tokenizer.get_vocab_size()
    if size < config.vocabulary_size:
        raise ConfigError(
            f"data.tokenizer.vocabulary_size: {config.vocabulary_size} is more than the text allows: it yields {size} "
            f"entries. Set it to {size} or less, or add text."
        )
    return tokenizer


def _byte() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _char(config: TokenizerConfig, reading: Reading, files: list[SourceFile]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    symbols: set[str] = set()
    for file in files:
        for item in read_documents(file, reading):
            if not isinstance(item, BadRecord):
                for piece in item.pieces():
                    symbols.update(piece)
    if not symbols:
        raise DataError("data.sources: no text to take characters from.")
    tokenizer = Tokenizer(models.WordLevel({symbol: number for number, symbol in enumerate(sorted(symbols))}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def load_pretrained(config: TokenizerConfig) -> Any:
    """The transformers tokenizer that a `pretrained` configuration names.

    Raises:
        ConfigError: it cannot be loaded, has no fast version, or no end-of-text token.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    assert config.path is not None
    try:
        if Path(config.path).is_file():
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=config.path)
            known = [token for token in (END_OF_TEXT, "</s>", "<|end_of_text|>") if token in tokenizer.get_vocab()]
            tokenizer.eos_token = known[0] if known else None
        else:
            tokenizer = AutoTokenizer.from_pretrained(config.path)
    except Exception as error:  # transformers, tokenizers and the hub raise many types
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"data.tokenizer.path: {config.path!r} cannot be loaded ({reason}).") from None
    if not tokenizer.is_fast:
        raise ConfigError(
            f"data.tokenizer.path: {config.path!r} has no tokenizer.json; convert it to a fast tokenizer."
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"data.tokenizer.path: {config.path!r} has no end-of-text token, which separates documents.")
    return tokenizer


@task(name="tokenizer", task_run_name="tokenizer-{config.type}")
def tokenizer_task(home: Home, config: TokenizerConfig, reading: Reading, files: list[SourceFile]) -> Reference:
    """Train or take the tokenizer."""
    return shown(build_tokenizer(home, config, reading, files))
