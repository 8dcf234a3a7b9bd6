"""Text becomes a small model, conversations an adapter beside it, and the merged model is scored and registered."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.config import PRESETS, RunConfig, load_config
from tasks.evaluate import evaluate, load_export
from tasks.home import Home
from tasks.pack import pack
from tasks.plan import plan
from tasks.register import Registered, locate_model, register
from tasks.stage import Reference
from tasks.tokenize import tokenize
from tasks.tokenizer import build_tokenizer
from tasks.train import Trained, train
from tests.tasks.test_chat import CHATML, chat_tokenizer, write_chat
from trainer.data.shards import ShardSet
from trainer.evaluation import score

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
QUICK = {"train.threads": 1, "train.precision": "fp32", "train.epochs": None}


def registered_model(home: Home, config: RunConfig) -> tuple[Trained, dict[str, float], Reference, Registered]:
    """Every stage of the flow, in order."""
    made = plan(home, config.data, config.model, config.train)
    data = config.data
    tokenizer = build_tokenizer(home, data.tokenizer, data.reading, made.files)
    shards = tokenize(home, data, made.files, made.validation_files, tokenizer)
    packing = pack(home, data, shards) if data.packing == "best_fit" else None
    done = train(
        home, config.name, config.model, config.train, data, tokenizer, shards, packing, config.parameters(), "sources"
    )
    scores = evaluate(home, config.evaluate, data.sequence_length, done, shards)
    registered = register(home, config.model_name, done, scores, tokenizer, "sources")
    assert registered.aliases == ["champion"]
    return done, scores.metrics, shards, registered


def test_a_text_model_learns_to_answer_by_an_adapter_and_is_registered(
    home: Home, texts: list[Path], tmp_path: Path
) -> None:
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", CHATML)
    common = {"data.tokenizer": {"type": "pretrained", "path": str(tokenizer)}, "data.sequence_length": 160, **QUICK}
    text = load_config(
        str(PRESETS / "quickstart.yaml"),
        {
            **common,
            "data.sources": [str(directory) for directory in texts],
            "data.validation_fraction": 0.2,
            "model.type": "llama",
            "model.config": SIZES,
            "train.steps": 60,
            "train.tokens": None,
            "train.global_batch": 8,
            "train.micro_batch": None,
            "evaluate.sample_tokens": 0,
        },
        "text",
    )
    base, *_ = registered_model(home, text)

    chat = load_config(
        str(PRESETS / "chat.yaml"),
        {
            **common,
            "data.sources": [str(write_chat(tmp_path / "chat.jsonl", 100))],
            "data.validation_fraction": 0.2,
            "model.pretrained": str(base.export_dir),
            "train.steps": 30,
            "train.ranks": 2,
            "train.learning_rate": 0.02,
            "train.global_batch": 8,
            "train.checkpoint.every": 1000,
            "evaluate.sample_tokens": 8,
        },
    )
    done, metrics, shards, registered = registered_model(home, chat)
    assert metrics["eval/tokens"] == ShardSet.open(shards.path).total("validation", "answer_tokens")
    untaught = score(load_export(base.export_dir), ShardSet.open(shards.path), 160, 32, torch.device("cpu"))
    assert metrics["eval/loss"] < untaught["eval/loss"] - 0.5
    sequences = 30 * 8
    assert 0 < done.tokens < 0.8 * sequences * 160, "labels are counted, not tokens"
    merged = AutoModelForCausalLM.from_pretrained(locate_model(home, "models:/chat@champion"))
    assert sum(p.numel() for p in merged.parameters()) == sum(
        p.numel() for p in AutoModelForCausalLM.from_pretrained(base.export_dir).parameters()
    )
    assert AutoTokenizer.from_pretrained(registered.path).chat_template == CHATML


def test_the_preset_for_conversations_packs_them_whole() -> None:
    data = load_config("chat").data
    assert (data.packing, data.document_mask, data.messages_field) == ("best_fit", True, "messages")
