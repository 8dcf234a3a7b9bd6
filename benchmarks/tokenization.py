"""The tokenize stage beside what a user would write instead, and beside the bare encoder that it is built on.

The text is what a machine has: Python's library, the sources of installed packages, /usr/share/doc. The vocabulary is
byte-level BPE of 32,000 entries, trained on a part of it.

- `vs_datasets_map`: the whole stage's rate over `datasets.map(batched=True, num_proc=2)` with `tokenizers` on a part
  of the same text. The peer's time is that of the map alone; ours holds everything from files to sealed shards.
- `vs_raw_encoder`: the whole stage's rate over gigatoken's `encode_batch` with all cores on the same texts, already in
  memory. Both meet every text once; a second pass over the same texts, which finds every word in its cache, is
  printed beside it.
- `peak_memory_mb_flat`: peak memory of the stage, its processes together, on four times the text over that on one.

    python benchmarks/tokenization.py [--megabytes 512] [--json]
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from claims import Claim, finish, note

VOCABULARY = 32_000
SUFFIXES = (
    ".py",
    ".pyi",
    ".txt",
    ".md",
    ".rst",
    ".html",
    ".c",
    ".h",
    ".js",
    ".json",
    ".cpp",
    ".hpp",
    ".cuh",
    ".css",
    "",
)
FILES = 8
"""Files that a text is spread over."""
PART_OF_PEER = 16
"""The slow peer works on one document of so many; rates are compared."""


def main() -> int:
    """Measure; the exit code is 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="text; less if the machine has less")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--directory", type=Path, help="where text and shards are written and left; default: temporary")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps({"stage": stage, "raw": raw, "map": datasets_map}[options.child[0]](*options.child[1:])))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        size = write_text(directory, options.megabytes * 10**6)
        train_tokenizer(directory)
        rates: dict[str, list[float]] = {"stage": [], "raw": [], "raw_second_pass": [], "map": []}
        for pair in range(options.pairs):
            for name, text in (("stage", "whole"), ("raw", "whole"), ("map", "part")):
                result = measured(name, str(directory), text)
                rates[name].append(result["mb_a_second"])
                if name == "raw":
                    rates["raw_second_pass"].append(result["second_pass"])
            note(f"pair {pair + 1}: " + ", ".join(f"{name} {values[-1]:.1f} MB/s" for name, values in rates.items()))
        peaks = {text: [peak_mb(directory, text) for _ in range(3)] for text in ("quarter", "whole")}
        note(f"peak memory in MB: {peaks}")
    over = {name: statistics.median(a / b for a, b in zip(rates["stage"], rates[name], strict=True)) for name in rates}
    flat = statistics.median(peaks["whole"]) / statistics.median(peaks["quarter"])
    return finish(
        [
            Claim("vs_datasets_map", over["map"], 20, "datasets.map, num_proc=2, tokenizers", "x", at_most=False),
            Claim("vs_raw_encoder", over["raw"], 0.5, "gigatoken's encode_batch in memory", "x", at_most=False),
            Claim("peak_memory_mb_flat", flat, 1.2, "the same on a quarter of the text", "x"),
        ],
        ("gigatoken", "tokenizers", "datasets", "pyarrow", "numpy"),
        options.json,
        text_mb=round(size / 1e6, 1),
        stage_over_raw_second_pass=round(over["raw_second_pass"], 3),
        mb_a_second={name: [round(value, 2) for value in values] for name, values in rates.items()},
        peak_mb=peaks,
    )


# --- text ----------------------------------------------------------------------------------------


def real_texts() -> Iterator[str]:
    """Texts that a machine has, each once and in the same order every time."""
    library = Path(sysconfig.get_path("stdlib"))
    seen = set()
    for root in (library, Path(sysconfig.get_path("purelib")), Path("/usr/share/doc"), Path("/usr/include")):
        for path in sorted(root.rglob("*")):
            try:
                if path.suffix not in SUFFIXES or not path.is_file() or not 200 < path.stat().st_size < 400_000:
                    continue
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            if "\0" not in text and hash(text) not in seen:
                seen.add(hash(text))
                yield text


def write_text(directory: Path, size: int) -> int:
    """Write `whole`, a quarter of it and the peer's part as JSON lines; returns the bytes of text of `whole`."""
    files: dict[str, list[IO[str]]] = {}
    for name, count in (("whole", FILES), ("quarter", FILES), ("part", 1)):
        shutil.rmtree(directory / name, ignore_errors=True)
        (directory / name).mkdir()
        files[name] = [open(directory / name / f"text-{n}.jsonl", "w", encoding="utf-8") for n in range(count)]  # noqa: SIM115
    written = 0
    for number, text in enumerate(real_texts()):
        line = json.dumps({"text": text}, ensure_ascii=False) + "\n"
        for name, share in (("whole", 1), ("quarter", 4), ("part", PART_OF_PEER)):
            if number % share == 0:
                files[name][number // share % len(files[name])].write(line)
        written += len(text.encode())
        if written >= size:
            break
    for file in itertools.chain(*files.values()):
        file.close()
    return written


def documents(directory: Path, text: str) -> list[str]:
    """The documents of a written text."""
    found = []
    for path in sorted((directory / text).iterdir()):
        with open(path, encoding="utf-8") as file:
            found += [json.loads(line)["text"] for line in file]
    return found


def train_tokenizer(directory: Path) -> None:
    """Put a tokenizer trained on the peer's part into `tokenizer/`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(directory, "part"), trainer)
    (directory / "tokenizer").mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer" / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>"}
    (directory / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))


# --- what is measured, each in a process of its own --------------------------------------------------


def measured(name: str, *arguments: str) -> dict[str, Any]:
    """Run one measurement in its own process."""
    command = [sys.executable, __file__, "--child", name, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def stage(place: str, text: str) -> dict[str, Any]:
    """The whole stage, from files to a sealed shard set, in a work directory of its own."""
    from tasks.home import Home
    from tasks.sources import resolve
    from tasks.stage import Reference
    from tasks.tokenize import DataConfig, tokenize
    from trainer.data.shards import ShardSet

    directory = Path(place)
    home = Home(directory / "home")
    shutil.rmtree(home.path, ignore_errors=True)
    home.path.mkdir()
    config = DataConfig.model_validate({"sources": [str(directory / text)], "tokenizer": str(directory / "tokenizer")})
    began = time.perf_counter()
    files = resolve(home, config.sources, "data.sources")
    tokenizer = Reference(path=directory / "tokenizer", fingerprint="benchmark")
    shards = ShardSet.open(tokenize(home, config, files, [], tokenizer).path)
    seconds = time.perf_counter() - began
    assert shards.manifest["encoder"]["name"].startswith("gigatoken"), shards.manifest["encoder"]
    size = sum(shards.total(split, "text_bytes") for split in ("train", "validation"))
    return {"mb_a_second": size / 1e6 / seconds}


def raw(place: str, text: str) -> dict[str, Any]:
    """gigatoken's own rate on texts that are in memory, in a first and a second pass."""
    from gigatoken import Tokenizer

    directory = Path(place)
    tokenizer = Tokenizer.from_json((directory / "tokenizer" / "tokenizer.json").read_text())
    texts = documents(directory, text)
    size = sum(len(text.encode()) for text in texts)
    rates = []
    for _ in range(2):
        began = time.perf_counter()
        for start in range(0, len(texts), 1000):
            tokenizer.encode_batch(texts[start : start + 1000], parallel=True)
        rates.append(size / 1e6 / (time.perf_counter() - began))
    return {"mb_a_second": rates[0], "second_pass": rates[1]}


def datasets_map(place: str, text: str) -> dict[str, Any]:
    """What tutorials show: `datasets.map` in batches on two processes."""
    import datasets
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    directory = Path(place)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer" / "tokenizer.json"))
    texts = documents(directory, text)
    rows = datasets.Dataset.from_dict({"text": texts})
    began = time.perf_counter()
    rows.map(
        lambda batch: {"ids": [e.ids for e in tokenizer.encode_batch(batch["text"], add_special_tokens=False)]},
        batched=True,
        num_proc=2,
        remove_columns=["text"],
        load_from_cache_file=False,
        cache_file_name=str(directory / "map.arrow"),
    )
    seconds = time.perf_counter() - began
    return {"mb_a_second": sum(len(text.encode()) for text in texts) / 1e6 / seconds}


def peak_mb(directory: Path, text: str) -> float:
    """Largest sum of the private memory of the stage's processes, in MB, sampled every 20 ms."""
    command = [sys.executable, __file__, "--child", "stage", str(directory), text]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0.0
    ended = threading.Event()
    threading.Thread(target=lambda: (process.wait(), ended.set()), daemon=True).start()
    while not ended.wait(0.02):
        peak = max(peak, sum(private_mb(pid) for pid in family(process.pid)))
    assert process.returncode == 0
    return round(peak, 1)


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            found += family(int(child))
    return found


def private_mb(pid: int) -> float:
    """Anonymous memory of a process; mapped files are the page cache's."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


if __name__ == "__main__":
    sys.exit(main())
