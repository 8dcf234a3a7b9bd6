"""Optimizers: which parameter gets what, and each update against its library's or its paper's."""

import copy

import pytest
import torch
from torch import nn

from trainer.config import MuonConfig, TrainConfig
from trainer.optimizers import build_optimizer, set_rate

MUON = TrainConfig(
    steps=1,
    optimizer="muon",
    precision="fp32",
    learning_rate=3e-3,
    weight_decay=0.1,
    muon=MuonConfig(learning_rate=0.05, momentum=0.9, weight_decay=0.02, newton_schulz_steps=3),
)
ADAMW, LION, ADAFACTOR = (MUON.model_copy(update={"optimizer": name}) for name in ("adamw", "lion", "adafactor"))
ALL = pytest.mark.parametrize("config", [ADAMW, MUON, LION, ADAFACTOR], ids=lambda config: config.optimizer)


class Tiny(nn.Module):
    """An embedding, two hidden matrices with biases, a norm and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        return self.head(self.norm(hidden + self.down(self.up(hidden).relu())))


def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def train(model: Tiny, *optimizers: torch.optim.Optimizer, first: int = 0, steps: int = 5) -> None:
    for step in range(first, first + steps):
        ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1).flatten())
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}


@ALL
def test_every_parameter_is_in_one_group_and_only_matrices_decay(config):
    model = tiny()
    optimizer = build_optimizer(model, config)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    groups = by_name(model, optimizer)
    plain = {name for name, group in groups.items() if group["weight_decay"] == 0}
    assert plain == {"embedding.weight", "up.bias", "down.bias", "norm.weight", "norm.bias"}


@pytest.mark.parametrize(
    ("chosen", "plain"),
    [
        ([], set()),
        (["norms"], {"norm.weight"}),
        (["biases"], {"up.bias", "down.bias", "norm.bias"}),
        (["embeddings"], {"embedding.weight"}),
    ],
)
def test_what_does_not_decay_can_be_chosen(chosen, plain):
    model = tiny()
    groups = by_name(model, build_optimizer(model, ADAMW.model_copy(update={"no_weight_decay": chosen})))
    assert {name for name, group in groups.items() if group["weight_decay"] == 0} == plain


def test_an_embedding_that_is_also_the_head_counts_as_an_embedding():
    model = tiny()
    model.head.weight = model.embedding.weight
    groups = by_name(model, build_optimizer(model, MUON))
    assert groups["embedding.weight"]["weight_decay"] == 0
    decaying = by_name(model, build_optimizer(model, MUON.model_copy(update={"no_weight_decay": ["norms", "biases"]})))
    assert decaying["embedding.weight"]["weight_decay"] == 0.1
    assert "betas" in decaying["embedding.weight"], "AdamW updates it, not Muon"


def test_frozen_parameters_are_left_out():
    model = tiny()
    model.up.weight.requires_grad_(False)
    assert "up.weight" not in by_name(model, build_optimizer(model, ADAMW))


def test_adamw_is_torchs_adamw():
    ours, theirs = tiny(), tiny()
    decayed = [theirs.up.weight, theirs.down.weight, theirs.head.weight]
    plain = [p for p in theirs.parameters() if all(p is not d for d in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    train(ours, build_optimizer(ours, ADAMW))
    train(theirs, torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, fused=True))
    assert same(ours, theirs)


def test_muon_with_adamw_is_torchs_muon_and_torchs_adamw_side_by_side():
    ours, theirs = tiny(), tiny()
    muon = torch.optim.Muon(
        [theirs.up.weight, theirs.down.weight], lr=0.05, momentum=0.9, weight_decay=0.02, ns_steps=3
    )
    plain = [theirs.embedding.weight, theirs.up.bias, theirs.down.bias, *theirs.norm.parameters()]
    adamw = torch.optim.AdamW(
        [{"params": [theirs.head.weight], "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    train(ours, build_optimizer(ours, MUON))
    train(theirs, muon, adamw)
    assert same(ours, theirs)
    assert not same(ours, tiny())


def stepped(config: TrainConfig) -> list[tuple[str, torch.Tensor, list[torch.Tensor], list[torch.Tensor]]]:
    """For each parameter: its name, initial value, its gradients in two steps, and its values after each."""
    model = tiny()
    optimizer = build_optimizer(model, config)
    records = [(name, parameter.detach().clone(), [], []) for name, parameter in model.named_parameters()]
    for step in range(2):
        train(model, optimizer, first=step, steps=1)
        for (_, parameter), (_, _, gradients, values) in zip(model.named_parameters(), records, strict=True):
            gradients.append(parameter.grad.clone())
            values.append(parameter.detach().clone())
    return records


def decay_of(name: str) -> float:
    return 0.1 if name in ("up.weight", "down.weight", "head.weight") else 0.0


def test_lion_is_the_formula_of_its_paper():
    # Chen et al. 2023, algorithm 2: c = b1 m + (1 - b1) g; w -= rate (sign(c) + decay w); m = b2 m + (1 - b2) g
    for name, weight, gradients, values in stepped(LION):
        mean = torch.zeros_like(weight)
        for gradient, value in zip(gradients, values, strict=True):
            direction = (0.9 * mean + 0.1 * gradient).sign()
            weight = weight - 3e-3 * (direction + decay_of(name) * weight)
            mean = 0.95 * mean + 0.05 * gradient
            torch.testing.assert_close(value, weight, atol=1e-7, rtol=1e-6)


def test_adafactor_is_the_formula_of_its_paper_at_the_rate_of_the_schedule():
    # Shazeer and Stern 2018, algorithms 4 and 5, with the rate in place of the relative step size
    def rms(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.square().mean().sqrt()

    for name, weight, gradients, values in stepped(ADAFACTOR):
        rows = columns = mean = 0.0
        for step, (gradient, value) in enumerate(zip(gradients, values, strict=True), start=1):
            kept = 1 - step**-0.8
            square = gradient.square() + 1e-30
            if weight.ndim == 2:
                rows = kept * rows + (1 - kept) * square.sum(1, keepdim=True)
                columns = kept * columns + (1 - kept) * square.sum(0, keepdim=True)
                variance = rows * columns / rows.sum()
            else:
                variance = mean = kept * mean + (1 - kept) * square
            update = gradient / variance.sqrt()
            update = update / max(1.0, rms(update).item())
            rate = 3e-3 * max(1e-3, rms(weight).item())
            weight = weight - rate * decay_of(name) * weight - rate * update
            torch.testing.assert_close(value, weight, atol=1e-7, rtol=1e-5)


@ALL
def test_saving_and_loading_in_the_middle_changes_no_bit(config, tmp_path):
    straight, resumed = tiny(), tiny()
    train(straight, build_optimizer(straight, config), steps=8)

    before = build_optimizer(resumed, config)
    train(resumed, before, steps=3)
    torch.save({"model": resumed.state_dict(), "optimizer": before.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    other = Tiny()
    other.load_state_dict(state["model"])
    after = build_optimizer(other, config)
    after.load_state_dict(state["optimizer"])
    train(other, after, first=3, steps=5)
    assert same(straight, other)


@ALL
def test_the_rate_is_a_share_of_each_groups_peak_also_after_loading(config):
    model = tiny()
    optimizer = build_optimizer(model, config)
    peaks = {name: group["lr"] for name, group in by_name(model, optimizer).items()}
    set_rate(optimizer, 0.5)
    set_rate(optimizer, 0.1)
    loaded = build_optimizer(model, config)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one in (optimizer, loaded):
        assert {name: group["lr"] for name, group in by_name(model, one).items()} == pytest.approx(
            {name: peak * 0.1 for name, peak in peaks.items()}
        )
    if config is MUON:
        assert peaks["up.weight"] == 0.05
    assert peaks["head.weight"] == 3e-3


def test_a_rate_of_zero_moves_nothing_where_nothing_decays():
    model = tiny()
    optimizer = build_optimizer(model, MUON)
    set_rate(optimizer, 0.0)
    train(model, optimizer, steps=2)
    assert same(model, tiny())
