"""The loader beside numpy's memory map and its peers, its start-up and memory at any size, and how long a step waits.

Every peer reads the same tokens in rows of 2,048, shuffled, in batches of 8, in whichever of its documented
settings is fastest here. It runs in a process of its own that stays up, and is measured in turn with ours.
Foreign peers live in environments of their own, installed on first use below FORGELINE_HOME or the user's cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from claims import Claim, finish, note

LENGTH, BATCH = 2048, 8
TOKENS = 24_600_000
MANY_TOKENS = 2 * 10**9 + 1
"""Tokens of the big set: 10**9 sequences of 2 tokens."""
ROUNDS = 7
SECONDS = 1.0
"""Time of one measurement of a peer."""
PEERS = {"datasets": None, "mosaicml-streaming": "0.13.0", "litdata": "0.2.76"}
"""Each peer, and the version that its own environment gets; None: the environment that this runs in."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--worker", nargs=2, metavar=("ROLE", "DIRECTORY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        role, directory = options.worker
        return WORKERS[role](Path(directory))

    with tempfile.TemporaryDirectory(prefix="forgeline-loader-") as name:
        directory = Path(name)
        rates, versions = throughput(directory)
        small, big = (starts(directory, sequences) for sequences in (10**6, 10**9))
        simulated = ask(start("imagined", directory))
        waits = data_wait(directory)

    ours, numpy_rates = rates["ours"], rates["numpy"]

    def over(peer: str) -> float:
        return statistics.median(a / b for a, b in zip(ours, rates[peer], strict=True))

    claims = [
        Claim("vs_numpy_memmap", over("numpy"), 0.8, "numpy.memmap slices to int64, same indices", "ratio", False),
        Claim("vs_datasets_dataloader", over("datasets"), 20, "datasets and torch's DataLoader", "ratio", False),
        Claim("vs_streaming_dataset", over("mosaicml-streaming"), 50, "MosaicML StreamingDataset", "ratio", False),
        Claim("vs_litdata", over("litdata"), 12, "LitData TokensLoader", "ratio", False),
        Claim("first_batch_ms", statistics.median(big["first_batch_ms"]), 100, "2 billion tokens, opened", "ms"),
        Claim("resume_ms", statistics.median(big["resume_ms"]), 100, "the middle of 2 billion tokens, opened", "ms"),
        Claim("memory_growth", big["memory_mb"] / small["memory_mb"], 1.05, "10^9 over 10^6 sequences", "ratio"),
        Claim("data_wait_fraction", waits, 0.01, "training steps of the trainer", "share of time"),
    ]
    return finish(
        claims,
        ("torch", "numpy", "pyarrow", "datasets"),
        options.json,
        million_tokens_per_second={name: statistics.median(values) for name, values in rates.items()},
        vs_numpy_memmap_all=[a / b for a, b in zip(ours, numpy_rates, strict=True)],
        peers=versions,
        memory_mb={"10^6": small["memory_mb"], "10^9": big["memory_mb"], "10^12 simulated": simulated["memory_mb"]},
    )


# --- who is measured, and how ------------------------------------------------------------------------


def throughput(directory: Path) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Million tokens a second of everyone in every round, and each peer's version and setting."""
    import numpy as np

    note("writing the tokens")
    np.random.default_rng(0).integers(0, 32_000, TOKENS).astype("<u2").tofile(directory / "tokens.bin")
    write_shards(directory / "set", [np.fromfile(directory / "tokens.bin", "<u2")], 32_000)
    processes = {"ours": start("ours", directory), "numpy": start("numpy", directory)}
    for peer, version in PEERS.items():
        python = sys.executable if version is None else environment(peer, version)
        processes[peer] = start(peer, directory, python)
    versions = {}
    for name, process in processes.items():
        versions[name] = ask(process)
        note(f"{name}: {versions[name]}")
    rates: dict[str, list[float]] = {name: [] for name in processes}
    for number in range(ROUNDS):
        for name, process in processes.items():
            print("go", file=process.stdin, flush=True)
            rates[name].append(ask(process)["rate"])
        note(f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:.1f}" for name, values in rates.items()))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return rates, {name: versions[name] for name in PEERS}


def start(role: str, directory: Path, python: str = sys.executable) -> Any:
    """A worker process."""
    command = [python, __file__, "--worker", role, str(directory)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: Any) -> dict[str, Any]:
    """The next JSON line of a worker; what libraries print in between is passed over."""
    for line in process.stdout:
        if line.startswith('{"'):
            return json.loads(line)
    raise RuntimeError(f"{' '.join(process.args)} ended with exit code {process.wait()}")


def environment(peer: str, version: str) -> str:
    """The Python of the environment that holds a peer; installed when it is not there."""
    home = os.environ.get("FORGELINE_HOME")
    base = Path(home).absolute() / "benchmarks" if home else Path.home() / ".cache" / "forgeline" / "benchmarks"
    python = base / peer / "bin" / "python"
    probe = f"from importlib.metadata import version as v; import sys; sys.exit(v({peer!r}) != {version!r})"
    if not python.exists() or subprocess.run([python, "-c", probe], stderr=subprocess.DEVNULL).returncode:
        note(f"installing {peer} {version} into {base / peer}")
        base.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", base / peer], check=True)
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        # torch first and held, so that a peer's other dependencies do not bring another build of it
        subprocess.run([*install, "torch==2.13.0", "numpy"], check=True, stdout=sys.stderr)
        held = base / f"{peer}.constraints"
        held.write_text("torch==2.13.0\n")
        subprocess.run([*install, "-c", held, f"{peer}=={version}"], check=True, stdout=sys.stderr)
    return str(python)


def serve(about: dict[str, Any], settings: dict[str, Callable[[], Iterable[Any]]]) -> int:
    """Pick the fastest setting, say which, then measure it whenever asked to."""
    first = {}
    for name, batches in settings.items():
        try:
            first[name] = measure(batches)
        except Exception as error:  # a peer's setting that does not work on this machine is not its best
            note(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            first[name] = 0.0
    best = max(first, key=lambda name: first[name])
    print(json.dumps({**about, "setting": best, "rates": first}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"rate": measure(settings[best])}), flush=True)
    return 0


def measure(batches: Callable[[], Iterable[Any]]) -> float:
    """Million tokens a second over whole batches of [8, 2048] tokens, epoch after epoch."""
    count, began = 0, time.perf_counter()
    while True:
        for _ in batches():
            count += 1
            if time.perf_counter() - began > SECONDS:
                return count * BATCH * LENGTH / (time.perf_counter() - began) / 1e6


# --- workers -----------------------------------------------------------------------------------------


def ours(directory: Path) -> int:
    """The loader."""
    import torch

    from trainer.data.loader import Loader, Sequences
    from trainer.data.shards import ShardSet

    sequences = Sequences.open(ShardSet.open(directory / "set"), LENGTH, None, seed=1)
    loader = Loader(sequences, BATCH, BATCH, 0, 1, torch.device("cpu"))
    return serve({"version": "this"}, {"default": lambda: loader.iterate(0, 10**9)})


def numpy_memmap(directory: Path) -> int:
    """Slices of a memory map at our indices, converted to int64."""
    import numpy as np

    from trainer.data.loader import Sequences
    from trainer.data.shards import ShardSet

    sequences = Sequences.open(ShardSet.open(directory / "set"), LENGTH, None, seed=1)
    order = sequences.locate(np.arange(len(sequences) // BATCH * BATCH))[:, 1].reshape(-1, BATCH).tolist()
    tokens = np.memmap(directory / "tokens.bin", dtype="<u2", mode="r")

    def into_one() -> Iterable[Any]:
        for batch in order:
            rows = np.empty((BATCH, LENGTH), dtype=np.int64)
            for row, index in zip(rows, batch, strict=True):
                row[:] = tokens[index * LENGTH : (index + 1) * LENGTH]
            yield rows

    def stacked() -> Iterable[Any]:
        for batch in order:
            yield np.stack([tokens[index * LENGTH : (index + 1) * LENGTH].astype(np.int64) for index in batch])

    return serve({"version": np.__version__}, {"into one array": into_one, "stacked": stacked})


def rows_of(directory: Path) -> Any:
    """The tokens as a matrix of sequences."""
    import numpy as np

    tokens = np.fromfile(directory / "tokens.bin", dtype="<u2")
    return tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH)


def hugging_face(directory: Path) -> int:
    """A `datasets` data set of the rows, mapped from disk, in torch's DataLoader."""
    import datasets
    import pyarrow as pa
    from torch.utils.data import DataLoader

    rows = rows_of(directory)
    values = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), LENGTH).cast(pa.list_(pa.uint16()))
    datasets.Dataset(pa.table({"tokens": values})).save_to_disk(directory / "datasets")
    stored = datasets.load_from_disk(str(directory / "datasets"))

    def batches(form: str, workers: int) -> Callable[[], Iterable[Any]]:
        loader = DataLoader(
            stored.with_format(form),
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        return lambda: loader

    settings = {f"{form}, {n} workers": batches(form, n) for form in ("numpy", "torch") for n in (0, 2)}
    return serve({"version": datasets.__version__}, settings)


def mosaicml(directory: Path) -> int:
    """A StreamingDataset of local MDS shards in its own loader."""
    import types
    from importlib.machinery import ModuleSpec
    from importlib.metadata import version

    import torch

    # only its picture data sets use torchvision, whose compiled part has to be of the very build of torch
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        module: Any = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.VisionDataset = module.CIFAR10 = module.to_tensor = object
        sys.modules[name] = module
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    with MDSWriter(out=str(directory / "mds"), columns={"tokens": f"ndarray:uint16:{LENGTH}"}) as writer:
        for row in rows_of(directory):
            writer.write({"tokens": row})

    def collate(samples: list[Any]) -> Any:
        return torch.stack([torch.from_numpy(sample["tokens"].astype("i8")) for sample in samples])

    def batches(workers: int) -> Callable[[], Iterable[Any]]:
        data = StreamingDataset(local=str(directory / "mds"), batch_size=BATCH, shuffle=True)
        loader = StreamingDataLoader(
            data,
            batch_size=BATCH,
            collate_fn=collate,
            num_workers=workers,
            drop_last=True,
            persistent_workers=workers > 0,
        )
        return lambda: loader

    about = {"version": version("mosaicml-streaming"), "torch": torch.__version__}
    return serve(about, {f"{workers} workers": batches(workers) for workers in (0, 2)})


def _halves(part: tuple[str, int, int]) -> Iterable[Any]:
    import numpy as np
    import torch

    path, first, end = part
    yield torch.from_numpy(np.fromfile(path, dtype="<u2")[first:end])


def lightning(directory: Path) -> int:
    """LitData's TokensLoader over chunks optimised for it."""
    import litdata
    import torch

    parts = [(str(directory / "tokens.bin"), n * TOKENS // 8, (n + 1) * TOKENS // 8) for n in range(8)]
    litdata.optimize(
        fn=_halves,
        inputs=parts,
        output_dir=str(directory / "litdata"),
        chunk_size=2049 * 2048,
        item_loader=litdata.TokensLoader(block_size=LENGTH),
        num_workers=1,
        verbose=False,
    )

    def batches(workers: int) -> Callable[[], Iterable[Any]]:
        data = litdata.StreamingDataset(
            str(directory / "litdata"),
            item_loader=litdata.TokensLoader(block_size=LENGTH),
            shuffle=True,
            drop_last=True,
        )
        loader = litdata.StreamingDataLoader(
            data, batch_size=BATCH, num_workers=workers, drop_last=True, persistent_workers=workers > 0
        )
        return lambda: (batch.long() for batch in loader)

    about = {"version": litdata.__version__, "torch": torch.__version__}
    return serve(about, {f"{workers} workers": batches(workers) for workers in (0, 2)})


# --- size ----------------------------------------------------------------------------------------------


def write_shards(directory: Path, parts: Iterable[Any], vocabulary: int, **more: Any) -> None:
    """A shard set of these token arrays, a document each, with ``more`` in its manifest."""
    import numpy as np

    from trainer.data.shards import FORMAT_VERSION, ShardWriter
    from trainer.durable import complete_directory

    content: dict[str, Any] = {"kind": "shards", "format_version": FORMAT_VERSION, **more}
    with complete_directory(directory, content) as aside:
        writer = ShardWriter(aside, "train", 0, vocabulary, "benchmark", 2**24)
        for part in parts:
            writer.add(part, np.array([len(part)]), ["tokens"], len(part))
        writer.flush()
        content["shards"] = writer.shards


def starts(directory: Path, sequences: int) -> dict[str, Any]:
    """Times to the first batch and memory with so many sequences of two tokens."""
    import numpy as np

    note(f"writing {sequences:.0e} sequences")
    tokens = 2 * sequences + 1
    block = np.random.default_rng(0).integers(0, 256, min(2**24, tokens), dtype=np.uint8)
    write_shards(directory / "many", (block[: tokens - n] for n in range(0, tokens, len(block))), 256)
    found = [ask(start("opened", directory)) for _ in range(5)]
    return {
        "first_batch_ms": [f["first_batch_ms"] for f in found],
        "resume_ms": [f["resume_ms"] for f in found],
        "memory_mb": statistics.median(f["memory_mb"] for f in found),
    }


def anonymous_memory_mb() -> float:
    """This process's memory without mapped files, whose pages the system takes back when it likes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


def opened(directory: Path) -> int:
    """Open the big set, take a batch from the start and one from the middle, then many for the memory."""
    import torch

    from trainer.data.loader import Loader, Sequences
    from trainer.data.shards import ShardSet

    times = {}
    for name, share in (("first_batch_ms", 0.0), ("resume_ms", 0.5)):
        began = time.perf_counter()
        sequences = Sequences.open(ShardSet.open(directory / "many"), LENGTH, None, seed=1)
        loader = Loader(sequences, BATCH, BATCH, 0, 1, torch.device("cpu"))
        batches = loader.iterate(int(len(sequences) * share), 100)
        next(batches)
        times[name] = 1000 * (time.perf_counter() - began)
        batches.close()
    sequences = Sequences.open(ShardSet.open(directory / "many"), 2, None, seed=1)
    for _ in Loader(sequences, BATCH, BATCH, 0, 1, torch.device("cpu")).iterate(len(sequences) // 2, 20_000):
        pass
    print(json.dumps({**times, "memory_mb": anonymous_memory_mb()}), flush=True)
    return 0


def imagined(_: Path) -> int:
    """The memory with 10**12 sequences over a text that is not there."""
    import torch

    from trainer.data.loader import Loader, Sequences
    from trainer.data.order import Order

    class Nothing:
        def __len__(self) -> int:
            return 2 * 10**12 + 1

        def gather(self, starts: Any, out: Any) -> None:
            out[:] = starts[:, None] % 256

    text: Any = Nothing()
    sequences = Sequences([text], Order((10**12,), (1.0,), 1), 2)
    for _batch in Loader(sequences, BATCH, BATCH, 0, 1, torch.device("cpu")).iterate(10**12 // 2, 20_000):
        pass
    print(json.dumps({"memory_mb": anonymous_memory_mb()}), flush=True)
    return 0


# --- a real training step ----------------------------------------------------------------------------


def data_wait(directory: Path) -> float:
    """Share of the time of the trainer's steps that was spent waiting for data, start-up left out."""
    from tasks.home import Home
    from tasks.sources import SourceConfig, resolve
    from tasks.tokenize import DataConfig, tokenize
    from tasks.tokenizer import TokenizerConfig, build_tokenizer
    from trainer.config import ModelConfig, TrainConfig, TrainerInput
    from trainer.durable import write_file
    from trainer.launcher import launch

    note("training")
    home = Home(directory / "home")
    home.path.mkdir()
    source = SourceConfig(path=f"{sysconfig.get_path('stdlib')}/asyncio/*.py")
    data = DataConfig(sources=[source], tokenizer=TokenizerConfig(type="byte"), validation_fraction=0.1)
    files = resolve(home, data.sources, "data.sources")
    tokenizer = build_tokenizer(home, data.tokenizer, data.text_field, files)
    shards = tokenize(home, data, files, [], tokenizer)
    run_dir = home.directory("runs", "wait")
    run_dir.mkdir()
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    settings = TrainerInput(
        name="wait",
        fingerprint="0" * 16,
        run_dir=run_dir,
        export_dir=home.directory("exports", "wait"),
        shards_dir=shards.path,
        tokenizer_dir=tokenizer.path,
        sequence_length=512,
        weights=None,
        steps=60,
        precision="fp32",
        micro_batch=8,
        model=ModelConfig(type="llama", config={**sizes, "num_key_value_heads": 4}),
        train=TrainConfig(steps=60, precision="fp32", global_batch=8, log_every=10, checkpoint={"every": 1000}),
        lineage={},
    )
    write_file(run_dir / "config.yaml", settings.text())
    launch(settings, lambda heartbeat: None)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    waits = [record["train/data_wait_fraction"] for record in records if "train/data_wait_fraction" in record]
    return statistics.mean(waits[1:])


WORKERS: dict[str, Callable[[Path], int]] = {
    "ours": ours,
    "numpy": numpy_memmap,
    "datasets": hugging_face,
    "mosaicml-streaming": mosaicml,
    "litdata": lightning,
    "opened": opened,
    "imagined": imagined,
}

if __name__ == "__main__":
    sys.exit(main())
