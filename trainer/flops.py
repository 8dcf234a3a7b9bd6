"""Model flops utilisation (MFU): the arithmetic that the model needs, over what the device can do in the same time.

Recomputed activations are no work of the model's, so that a run that saves memory by them shows a lower MFU
(Chowdhery et al. 2022, PaLM, appendix B).
"""

import math
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.durable import read_record, write_record

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "A30": 165e12,
    "A40": 150e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "MI300X": 1307e12,
    "MI325X": 1307e12,
    "MI355X": 2516e12,
}
"""Dense 16-bit operations a second with fp32 accumulation, by words in the name that torch gives the device.

From the vendors' data sheets; where one gives the rate with sparsity alone, half of it.
"""


def flops_per_token(model: nn.Module, sequence_length: int) -> float:
    """Floating-point operations of a forward and backward pass, a token.

    6 N + 12 L H Q T (Chowdhery et al. 2022, appendix B): N weights of matrices that a token is multiplied with,
    L attention layers of H heads of width Q, T positions that are attended to (a causal mask saves nothing
    here; a sliding window does). A lookup of an embedding is no product, an expert that is not chosen is not
    computed, and the gradient of a frozen matrix is left out.

    Args:
        model: a transformers causal language model, before it is divided over ranks.
        sequence_length: tokens of context.
    """
    config = model.config.get_text_config()  # type: ignore[union-attr, operator]
    output = model.get_output_embeddings()  # type: ignore[operator]
    looked_up = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
        if output is None or parameter is not output.weight
    }
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    chosen = config.num_experts_per_tok / experts if experts else 1.0
    flops = 0.0
    for name, parameter in model.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 leaves an empty tensor here
        if len(shape) >= 2 and parameter not in looked_up:
            share = chosen if ".experts." in name else 1.0
            flops += (6 if parameter.requires_grad else 4) * share * math.prod(shape)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    for kind in kinds:
        if kind in ("full_attention", "sliding_attention"):
            attended = min(sequence_length, config.sliding_window) if kind == "sliding_attention" else sequence_length
            flops += 12 * config.num_attention_heads * width * attended
    return flops


def matrix_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a matrix product on ``device``, measured in a tenth of a second."""
    size = 8192 if device.type == "cuda" else 512
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best, end = math.inf, time.perf_counter() + 0.1
    while best == math.inf or time.perf_counter() < end:  # the best of many, for others may be using the machine
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def peak_flops(device: torch.device, dtype: torch.dtype, run_dir: Path) -> dict[str, Any]:
    """What the device of one rank can do at most: ``flops`` a second, and the ``source`` of that figure.

    A known accelerator's 16-bit rate is looked up. Any other is measured, and kept in the run directory,
    so that a resumed run goes on with the same measure.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = next((flops for words, flops in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)
        if known and dtype in (torch.bfloat16, torch.float16):
            return {"flops": known, "source": f"data sheet of {name}"}
    else:
        name = f"cpu with {torch.get_num_threads()} threads"
    source = f"measured on {name} in {str(dtype).removeprefix('torch.')}"
    file = run_dir / "peak.json"
    kept = read_record(file)
    if kept is None or kept["source"] != source:
        kept = {"flops": matrix_product_rate(device, dtype), "source": source}
        write_record(file, kept)
    return kept
