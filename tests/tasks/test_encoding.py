"""The encoders: the fast one gives the reference's ids or is not used, and text never becomes a control token."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tasks import encoding
from tasks.encoding import AWKWARD, CANARY, Tokenization, fast_encoder_agrees
from tasks.home import Home
from tasks.reading import Reading
from tasks.sources import SourceConfig, resolve
from tasks.tokenizer import END_OF_TEXT, TokenizerConfig, build_tokenizer

KINDS = ("byte", "char", "bpe")
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=80), max_size=6)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Path]:
    """Directories of a byte, a char and a bpe tokenizer of Python's json package."""
    home = Home(tmp_path_factory.mktemp("home"))
    sources = [SourceConfig(path="$PYTHON_STDLIB/json/*.py")]
    awkward = tmp_path_factory.mktemp("text") / "awkward.jsonl"
    awkward.write_text("".join(json.dumps({"text": text}) + "\n" for text in AWKWARD if text))
    files = resolve(home, [*sources, SourceConfig(path=str(awkward))], "s")
    return {
        kind: build_tokenizer(home, TokenizerConfig(type=kind, vocabulary_size=600), Reading(), files).path
        for kind in KINDS
    }


def verdict(directory: Path, sample: list[str]) -> dict:
    return fast_encoder_agrees(Tokenization(directory, fast=False), sample)


def one(tokenization: Tokenization, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    whole = np.ones(len(texts), bool)
    return tokenization.documents(texts, whole, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_encoder_is_used_and_gives_the_ids_of_the_reference(tokenizers, kind):
    found = verdict(tokenizers[kind], ["def main(): pass"])
    assert found["fast"], found
    fast, reference = (Tokenization(tokenizers[kind], use) for use in (True, False))
    for flat in zip(fast.encode(AWKWARD), reference.encode(AWKWARD), strict=True):
        assert np.array_equal(*flat)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_in_text_never_becomes_the_control_token(tokenizers, kind, fast):
    tokenization = Tokenization(tokenizers[kind], fast)
    texts = [END_OF_TEXT, f"a{END_OF_TEXT}b", f"{END_OF_TEXT}{END_OF_TEXT}", CANARY]
    ids, lengths = one(tokenization, texts)
    assert (ids == tokenization.end_id).sum() == len(texts)
    assert (ids[np.cumsum(lengths) - 1] == tokenization.end_id).all()


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_any_unicode_text_comes_back_as_it_was(tokenizers, kind):
    tokenization = Tokenization(tokenizers[kind], fast=True)

    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    def check(texts: list[str]) -> None:
        ids, lengths = one(tokenization, texts)
        rows = np.split(ids, np.cumsum(lengths))[: len(texts)]
        assert [tokenization.reference.decode(row[:-1].tolist(), skip_special_tokens=False) for row in rows] == texts
        expected = Tokenization.encode.__get__(Tokenization(tokenizers[kind], fast=False))(texts)[0]
        assert np.array_equal(np.concatenate([row[:-1] for row in rows]) if rows else [], expected)

    check()


def test_an_encoder_that_differs_anywhere_is_not_used_and_it_is_said_where(tokenizers, monkeypatch):
    right = encoding._Gigatoken.__call__

    def wrong(self, texts):
        ids, lengths = right(self, texts)
        return (ids + 1 if texts == ["text of the input"] else ids), lengths

    monkeypatch.setattr(encoding._Gigatoken, "__call__", wrong)
    assert verdict(tokenizers["bpe"], ["other"])["fast"]
    found = verdict(tokenizers["bpe"], ["other", "text of the input"])
    assert not found["fast"]
    assert found["name"].startswith("tokenizers ")
    assert found["why"] == "the fast encoder gives other ids for 'text of the input'"


def test_a_tokenizer_that_the_fast_encoder_cannot_load_uses_the_reference(tokenizers, tmp_path):
    from tokenizers import models, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2, END_OF_TEXT: 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    found = verdict(tmp_path, ["ab"])
    assert not found["fast"]
    assert "cannot load" in found["why"]
    assert one(Tokenization(tmp_path, False), ["ab a"])[0].tolist() == [1, 2, 1, 3]


def test_the_beginning_token_is_written_where_the_tokenizers_own_template_has_it(tokenizers, tmp_path):
    tokenizer = Tokenizer.from_file(str(tokenizers["bpe"] / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    number = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    for fast in (True, False):
        tokenization = Tokenization(tmp_path, fast)
        assert (tokenization.beginning_token, tokenization.beginning_id) == ("<s>", number)
        ids, lengths = one(tokenization, ["<s>", ""])
        assert (ids == number).nonzero()[0].tolist() == [0, lengths[0]]
        ids, lengths = tokenization.documents(["a", "b"], np.array([True, False]), np.array([False, True]))
        assert (ids[0], ids[-1], lengths.tolist()) == (number, tokenization.end_id, [2, 2])
    assert Tokenization(tokenizers["bpe"], fast=True).beginning_id is None


def test_the_cache_of_the_fast_encoder_is_bounded(tokenizers, monkeypatch):
    monkeypatch.setattr(encoding, "_CACHE_BYTES", 2**20)
    tokenization = Tokenization(tokenizers["bpe"], fast=True)
    loaded = tokenization._encode._backend
    random = np.random.default_rng(0)
    for _ in range(20):
        words = random.integers(97, 123, (20_000, 9), dtype=np.uint8)
        tokenization.encode([" ".join(bytes(word).decode() for word in words)])
    assert tokenization._encode._backend is not loaded
