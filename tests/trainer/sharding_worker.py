"""One rank of test_sharding: trains tiny models one after the other, and counts what each keeps in memory."""

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.trainer.live_bytes import LiveBytes
from trainer.activations import checkpoint_activations
from trainer.config import TrainerInput
from trainer.engine import shard_parts, start_engine, start_process_group, whole_weights
from trainer.model import build_model, load_tokenizer, loss_of, save_model
from trainer.precision import WEIGHTS

STEPS, SEQUENCES, LENGTH, VOCABULARY = 4, 8, 32, 257
FILE_BYTES = 60_000
_GRADIENTS = ("all_grad_tensors", "averaged_gradients", "grad_partitions_flat_buffer")
"""Where DeepSpeed's optimizers keep reduced gradients: between micro-batches, at the step, and with ZeRO 3."""


def tokens_of(step: int) -> torch.Tensor:
    """The global batch of a step: runs that count upwards, so that there is something to learn."""
    first = torch.randint(VOCABULARY, (SEQUENCES, 1), generator=torch.Generator().manual_seed(step))
    return (first + torch.arange(LENGTH + 1)) % VOCABULARY


def resident(tensors: Iterable[Any]) -> dict[int, int]:
    """The bytes of each storage behind tensors, by its address."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(inner)


def counted(engine: Any) -> dict[str, int]:
    """Bytes of this rank's weights, optimizer (fp32 weights and moments) and gradients."""
    outer = engine.optimizer
    inner = getattr(outer, "optimizer", outer)
    parameters = list(engine.module.parameters())
    updated = [parameter for group in inner.param_groups for parameter in group["params"]]
    weights = resident([*(p.data for p in parameters), *(getattr(p, "ds_tensor", None) for p in parameters)])
    masters = getattr(outer, "fp32_partitioned_groups_flat", [])
    states = resident([*(p.data for p in updated), *tensors_in(dict(inner.state)), *tensors_in(masters)])
    held = [getattr(outer, name, None) for name in _GRADIENTS]
    gradients = resident([*tensors_in(held), *(p.grad for p in parameters + updated)])
    return {
        "weights": sum(weights.values()),
        "optimizer": sum(size for place, size in states.items() if place not in weights),
        "gradients": sum(gradients.values()),
    }


def train(settings: TrainerInput, device: torch.device) -> dict[str, Any]:
    """Build, train a few steps, export; returns losses and bytes."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    tokenizer = load_tokenizer(settings.tokenizer_dir)
    with LiveBytes() as built:
        model = build_model(
            settings.model,
            tokenizer,
            settings.sequence_length,
            WEIGHTS[settings.precision],
            settings.train.seed,
            shard_parts(settings),
        )
    parameters = [getattr(p, "ds_numel", p.numel()) for p in model.parameters()]
    checkpoint_activations(model, settings.train.activation_checkpointing)
    engine = start_engine(model, settings, load_universal=False)
    losses, in_backward = [], []
    for step in range(STEPS + 1):
        total = torch.zeros((), dtype=torch.double, device=device)
        share = tokens_of(step).to(device).chunk(ranks)[rank]
        for micro_batch in share.split(settings.micro_batch):
            with torch.set_grad_enabled(step < STEPS):
                loss = loss_of(engine, micro_batch[:, :-1], micro_batch[:, 1:].contiguous())
            if step < STEPS:
                engine.backward(loss)
                in_backward.append(counted(engine)["gradients"])
                engine.step()
            total += loss.detach() / settings.accumulation_steps / ranks
        distributed.all_reduce(total)
        losses.append(total.item())
    with LiveBytes() as exported:
        for_rank_0 = whole_weights(engine)
        if rank == 0:
            settings.export_dir.mkdir()
            save_model(model, for_rank_0, settings.export_dir, FILE_BYTES)
        else:
            list(for_rank_0)
    result = {
        "losses": losses,
        "parameters": sum(parameters),
        "largest": max(parameters),
        "built": built.peak,
        "exported": exported.peak,
        **counted(engine),
        "gradients": in_backward[-2:],
    }
    engine.destroy()
    return result


def main(cases: Path, results: Path) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    start_process_group(device)
    found = {}
    for name, settings in json.loads(cases.read_text()).items():
        found[name] = train(TrainerInput.model_validate(settings), device)
        gc.collect()
    results.with_name(f"{results.name}-{distributed.get_rank()}").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # as the trainer ends
