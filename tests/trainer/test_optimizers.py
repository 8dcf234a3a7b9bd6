"""Optimizers: which parameter gets what, and Muon with AdamW exactly as torch's two side by side."""

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
ADAMW = MUON.model_copy(update={"optimizer": "adamw"})


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


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=lambda config: config.optimizer)
def test_every_parameter_is_in_one_group_and_only_matrices_decay(config):
    model = tiny()
    optimizer = build_optimizer(model, config)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    groups = by_name(model, optimizer)
    plain = {name for name, group in groups.items() if group["weight_decay"] == 0}
    assert plain == {"embedding.weight", "up.bias", "down.bias", "norm.weight", "norm.bias"}


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


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=lambda config: config.optimizer)
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


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=lambda config: config.optimizer)
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
