"""What a training run is: the model and training sections of the configuration, and the trainer's one input file."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, PositiveInt, model_validator

from trainer.activations import ActivationCheckpointingConfig
from trainer.adapters import AdapterConfig
from trainer.parallel import WHOLE_MATRIX_OPTIMIZERS, Layout, ParallelConfig, check_pairings
from trainer.parts.profiler import ProfileConfig
from trainer.settings import OPERATIONAL, Settings
from trainer.sharding import CommunicationConfig, OffloadConfig, check_sharding


class ModelConfig(Settings):
    """The model: a transformers causal language model, from scratch or continued from weights."""

    type: str = "llama"
    """Architecture, as transformers names it in `model_type` (llama, qwen3, gpt2, …)."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Sizes and settings of the architecture's transformers configuration (hidden_size, num_hidden_layers, …)."""
    pretrained: str | None = None
    """Directory or hub name of weights to continue from; `type` and `config` are then read from there."""
    attention: Annotated[Literal["auto", "eager", "sdpa", "flash"], OPERATIONAL] = "auto"
    """Attention's kernel. auto: torch's best; flash: flash-attn, for long sequences on GPUs; eager: to look inside."""
    adapter: AdapterConfig | None = None
    """Train a small adapter beside the pretrained weights in place of them: for large models on small machines."""

    @model_validator(mode="after")
    def _one_origin(self) -> "ModelConfig":
        if self.pretrained and self.config:
            raise ValueError("config: cannot be set together with pretrained, whose own configuration is used")
        if self.adapter and not self.pretrained:
            raise ValueError("adapter: needs pretrained, the weights that it adapts")
        return self


class ScheduleConfig(Settings):
    """The learning rate over the run, as a share of `train.learning_rate`."""

    type: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    """Shape after the warm-up. cosine or linear: the length of the run is fixed; wsd (stable, then a linear decay):
    more data may follow, as no rate before the decay depends on the end; inverse_sqrt: as in older recipes, with no
    end at all; constant: short fine-tuning."""
    warmup: Annotated[float, Ge(0), Lt(1)] | None = None
    """Share of all steps in which the rate rises linearly from 0. Unset: 0.02, unless warmup_steps or
    warmup_tokens is set."""
    warmup_steps: Annotated[int, Ge(0)] | None = None
    """The warm-up in steps: where a known recipe is followed at another length of run."""
    warmup_tokens: Annotated[int, Ge(0)] | None = None
    """The warm-up in tokens, rounded up to whole steps: where batch size or context are still being changed."""
    decay: Annotated[float, Gt(0), Le(1)] = 0.2
    """Share of all steps in which wsd decays, at the end."""
    minimum: Annotated[float, Ge(0), Le(1)] = 0.1
    """Lowest rate after the warm-up, as a share of the peak. constant has no use for it."""
    cycles: Annotated[int, Ge(1)] = 1
    """Times that warm-up and decay are run through, in equal parts of the run: more than 1 re-warms the rate, from
    the minimum. A run that continues from weights (model.pretrained) re-warms without it: it has a warm-up of its
    own."""

    @model_validator(mode="after")
    def _one_warmup(self) -> "ScheduleConfig":
        given = [name for name in ("warmup", "warmup_steps", "warmup_tokens") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: set at most one of warmup, warmup_steps and warmup_tokens (set: {given})")
        return self


class MuonConfig(Settings):
    """Settings of the Muon optimizer, which updates the hidden matrices; AdamW updates the rest."""

    learning_rate: Annotated[float, Gt(0)] = 0.02
    """Peak rate of the hidden matrices; `train.learning_rate` is that of the rest."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the momentum."""
    weight_decay: Annotated[float, Ge(0)] = 0.0
    """Decoupled weight decay of the hidden matrices."""
    newton_schulz_steps: Annotated[int, Ge(1)] = 5
    """Iterations that orthogonalise an update."""


class CheckpointConfig(Settings):
    """When checkpoints are written, and which are kept."""

    every: Annotated[int, Ge(1), OPERATIONAL] = 200
    """Steps between checkpoints; the last step always writes one."""
    keep: Annotated[int, Ge(1), OPERATIONAL] = 2
    """Number of newest checkpoints that are kept."""
    keep_every: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Checkpoints at multiples of this step are kept for ever."""
    keep_best: Annotated[bool, OPERATIONAL] = False
    """Keep the checkpoint with the lowest validation loss; needs `train.evaluation`."""


class PeriodicEvaluationConfig(Settings):
    """The loss on held-out text while training goes on, recorded as `validation/loss`."""

    every: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Steps between evaluations; the last step always has one. Unset: none."""
    batches: Annotated[int, Ge(1), OPERATIONAL] = 8
    """Global batches of text, always the same first ones of the validation split, or all of it where it has fewer."""


_OURS = {
    "train_batch_size": "it is train.global_batch",
    "train_micro_batch_size_per_gpu": "it is train.micro_batch",
    "gradient_accumulation_steps": "it follows from train.global_batch, train.micro_batch and train.ranks",
    "gradient_clipping": "it is train.gradient_clipping",
    "zero_optimization.stage": "it is train.zero_stage",
    "zero_optimization.offload_optimizer.device": "it is train.offload.optimizer",
    "zero_optimization.offload_param.device": "it is train.offload.parameters",
    "zero_optimization.overlap_comm": "it is train.communication.overlap",
    "zero_optimization.reduce_bucket_size": "it is train.communication.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size": "it is train.communication.gather_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size": "it is train.communication.gather_bucket_size",
    "zero_optimization.zero_quantized_weights": "it is train.communication.quantized_weights",
    "zero_optimization.zero_quantized_gradients": "it is train.communication.quantized_gradients",
    "zero_optimization.zero_hpz_partition_size": "it is train.communication.secondary_partition_size",
    "communication_data_type": "it is train.communication.gradient_dtype",
    "bf16.enabled": "it is train.precision",
    "fp16.enabled": "it is train.precision",
    "torch_autocast": "it is train.precision: autocast",
    "optimizer": "it is train.optimizer",
    "scheduler": "it is train.schedule",
    "checkpoint": "checkpoints are train.checkpoint",
    "tensor_parallel.autotp_size": "it is train.parallel.tensor",
    "expert_parallel.autoep_size": "it is train.parallel.expert",
    "sequence_parallel_size": "it is train.parallel.sequence",
    "flops_profiler": "it is train.flops_profile_step",
}
"""Keys of DeepSpeed's configuration that have a name here, which would otherwise say something else."""


def _sets(mapping: Any, key: str) -> bool:
    """Whether a nested mapping holds something under a dotted key."""
    for part in key.split("."):
        if not isinstance(mapping, dict) or part not in mapping:
            return False
        mapping = mapping[part]
    return True


class TrainConfig(Settings):
    """The training stage."""

    steps: PositiveInt | None = None
    """Optimizer steps of the run. Set exactly one of steps, tokens and epochs."""
    tokens: PositiveInt | None = None
    """Tokens to train on, rounded up to whole steps."""
    epochs: Annotated[float, Gt(0), Le(1e9)] | None = None
    """Passes over the training text, rounded up to whole steps."""
    global_batch: Annotated[int, Ge(1)] = 32
    """Sequences a step, over all ranks and accumulation steps."""
    micro_batch: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Sequences in one forward pass. Unset: the whole share of the global batch of a data-parallel rank."""
    ranks: Annotated[int, Ge(1), OPERATIONAL] = 1
    """Training processes on this host: one an accelerator."""
    parallel: Annotated[ParallelConfig, OPERATIONAL] = ParallelConfig()
    """What the ranks divide besides the batch."""
    threads: Annotated[PositiveInt | None, OPERATIONAL] = None
    """CPU threads of each rank. Unset: the host's cores shared out evenly."""
    launcher: Annotated[Literal["torchrun"], OPERATIONAL] = "torchrun"
    """What starts the ranks."""
    seed: Annotated[int, Ge(0), Lt(2**62)] = 1
    """Seed of the initial weights, the order of the data, and dropout."""
    learning_rate: Annotated[float, Gt(0)] = 1e-3
    """Peak learning rate."""
    optimizer: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    """adamw: the default. lion: half of adamw's state; a third to a tenth of its learning_rate, three to ten times
    its weight_decay. adafactor: hardly any state, where memory is short; learning_rate is a share of each weight's
    root mean square, 0.01 is usual. muon: hidden matrices by Muon, the rest by adamw, fewer steps to the same loss.
    adafactor and muon update whole matrices: zero_stage 0 or 1 (sharded by whole parameters), precision fp32 or
    autocast."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Decay of the mean of the gradient in an update of adamw or lion."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay of the mean of the squared gradient (adamw), or of the mean that is kept (lion: 0.99 is usual)."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Decoupled weight decay; adafactor's is relative to the root mean square too."""
    no_weight_decay: list[Literal["embeddings", "norms", "biases"]] = Field(["embeddings", "norms", "biases"])
    """What has none; [norms, biases] lets embeddings decay too."""
    muon: MuonConfig = MuonConfig()
    """Used with optimizer: muon."""
    schedule: ScheduleConfig = ScheduleConfig()
    """The learning rate over time."""
    gradient_clipping: Annotated[float, Ge(0)] = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""
    z_loss: Annotated[float, Ge(0)] = 0.0
    """Coefficient of the squared log-sum-exp of the logits, added to the loss that training minimises: 1e-4 keeps
    logits from drifting in long bf16 runs. Recorded as train/z_loss; train/loss and evaluation are without it."""
    label_smoothing: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of each label that is spread over the whole vocabulary: 0.1 against overconfidence on small data.
    Recorded losses are without it."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "autocast", "fp8"] = "auto"
    """Arithmetic of the model; all but fp32 keep fp32 weights for the update. bf16: the usual choice. fp16: for GPUs
    without bf16; the loss is scaled, and a step whose gradients overflow leaves the weights as they are. autocast:
    fp32 weights with matrix products in bf16, for optimizers that need whole matrices. fp8: bf16 with the products
    of linear layers in fp8 (compute capability 8.9 or newer; `pip install forgeline[fp8]`), for models of a billion
    parameters and more. auto: what the device does well, chosen once a run."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """DeepSpeed ZeRO stage: what is sharded over the ranks (1 optimizer, 2 also gradients, 3 also parameters).
    With bf16, fp16 and fp8 at least 1: the fp32 weights that they need are sharded in any case."""
    offload: OffloadConfig = OffloadConfig()
    """What waits in the host's memory or on its disk."""
    communication: CommunicationConfig = CommunicationConfig()
    """How ranks exchange gradients and weights."""
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """Recomputation of activations."""
    compile: Annotated[bool, OPERATIONAL] = False
    """Compile the model with torch.compile (needs a C++ compiler on CPUs; without one it stays eager and says so)."""
    log_every: Annotated[int, Ge(1)] = 10
    """Steps between records in the journal and MLflow; the loss is the mean over them."""
    hang_timeout: Annotated[float, Gt(0), OPERATIONAL] = 600.0
    """Seconds without a finished step after which training is taken for hung, ended and resumed."""
    cross_entropy: Annotated[Literal["full", "chunked"], OPERATIONAL] = "full"
    """chunked: never hold all tokens' logits at once: less memory with large vocabularies, a little more time."""
    tensorboard: Annotated[bool, OPERATIONAL] = False
    """Write TensorBoard's event files beside MLflow, into `tensorboard/` of the run directory."""
    profile: Annotated[ProfileConfig | None, OPERATIONAL] = None
    """Set it to see where the time of a step goes: `{start_step: 10, steps: 3}`."""
    flops_profile_step: Annotated[PositiveInt | None, OPERATIONAL] = None
    """Step in which DeepSpeed's flops profiler counts each module's operations, into `profile/flops.txt`."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    evaluation: PeriodicEvaluationConfig = PeriodicEvaluationConfig()
    """The loss on held-out text while training goes on."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Merged over the DeepSpeed configuration that is generated, for everything not named here."""

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        given = [name for name in ("steps", "tokens", "epochs") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"steps: set exactly one of steps, tokens and epochs (set: {', '.join(given) or 'none'})")
        data = self.layout.data
        if self.global_batch % data:
            raise ValueError(
                f"global_batch: {self.global_batch} sequences do not divide over {data} data-parallel ranks"
            )
        share = self.global_batch // data
        if self.micro_batch and share % self.micro_batch:
            raise ValueError(
                f"micro_batch: each of {data} data-parallel ranks has {share} sequences of the global batch, "
                f"which micro_batch={self.micro_batch} does not divide"
            )
        evaluated = self.evaluation.every
        if self.checkpoint.keep_best and (evaluated is None or self.checkpoint.every % evaluated):
            raise ValueError(
                f"checkpoint: keep_best needs evaluation.every (it is {evaluated or 'unset'}) to divide "
                f"checkpoint.every={self.checkpoint.every}, so that every checkpoint has a validation loss"
            )
        if self.flops_profile_step and self.compile:
            raise ValueError("flops_profile_step: it counts in an eager model; set compile: false for that step")
        if self.cross_entropy == "chunked" and (self.parallel.tensor > 1 or self.parallel.pipeline > 1):
            raise ValueError(
                "cross_entropy: chunked needs an undivided model: parallel.tensor: 1, parallel.pipeline: 1"
            )
        check_pairings(self.parallel, self.zero_stage, self.optimizer, self.compile)
        check_sharding(self.zero_stage, self.layout.averaged, self.offload, self.communication)
        sharded = self.communication.quantized or self.communication.secondary_partition_size > 1
        if self.parallel.expert > 1 and (sharded or "nvme" in (self.offload.optimizer, self.offload.parameters)):
            raise ValueError(
                "parallel: expert cannot be combined with offload to nvme, or with communication's quantized_weights, "
                "quantized_gradients or secondary_partition_size"
            )
        for key, owner in _OURS.items():
            if _sets(self.deepspeed, key):
                raise ValueError(f"deepspeed: {key} cannot be set here; {owner}")
        if self.precision == "fp8" and self.zero_stage == 3:
            raise ValueError("zero_stage: 3 divides the weights that precision=fp8 scales whole; use 0, 1 or 2")
        if self.optimizer in WHOLE_MATRIX_OPTIMIZERS:
            allowed: dict[str, tuple[Any, ...]] = {"zero_stage": (0, 1), "precision": ("auto", "fp32", "autocast")}
            for key, values in allowed.items():
                if (value := getattr(self, key)) not in values:
                    raise ValueError(
                        f"{key}: {value} shards or flattens the matrices that optimizer={self.optimizer} updates "
                        f"whole; use {key} {' or '.join(map(str, values))}, or optimizer adamw or lion"
                    )
            buckets = (self.communication.reduce_bucket_size, self.communication.gather_bucket_size)
            if self.offload.optimizer != "none" or any(buckets) or self.communication.overlap is not None:
                raise ValueError(
                    f"optimizer: {self.optimizer} is sharded by whole parameters, without DeepSpeed's "
                    "offload.optimizer, communication.overlap and bucket sizes; leave them unset, or use adamw or lion"
                )
        return self

    @property
    def layout(self) -> Layout:
        """How the ranks divide the work."""
        return Layout.of(self.ranks, self.parallel)

    @property
    def needs_operations(self) -> bool:
        """Whether DeepSpeed has to compile operations, which not every machine can."""
        return self.communication.quantized or "nvme" in (self.offload.optimizer, self.offload.parameters)


class TrainerInput(Settings):
    """Everything the training process is told: the run directory's `config.yaml`."""

    name: str
    """The run's name."""
    fingerprint: str
    """The run's fingerprint."""
    run_dir: Path
    """Where checkpoints, journal, logs and result go."""
    export_dir: Path
    """Where the finished model goes, in transformers' format."""
    shards_dir: Path
    """The shard set."""
    tokenizer_dir: Path
    """Directory of the tokenizer's files."""
    sequence_length: int
    """Tokens of context."""
    weights: list[float] | None
    """Mixture weight of each source; None walks all text as one stream."""
    packing_dir: Path | None = None
    """The packing plans of `data.packing: best_fit`; None slices the concatenated text."""
    document_mask: bool = False
    """Whether attention and positions stay inside documents."""
    steps: int
    """Steps planned."""
    warmup_steps: int = 0
    """Steps of each warm-up, resolved."""
    precision: Literal["fp32", "bf16", "fp16", "autocast", "fp8"]
    """Arithmetic, resolved."""
    micro_batch: int
    """Sequences in one forward pass of one rank, resolved; halved after memory ran out."""
    model: ModelConfig
    """The model section."""
    train: TrainConfig
    """The training section."""
    lineage: dict[str, Any]
    """Where the data came from; copied into the export's manifest."""

    @classmethod
    def read(cls, path: Path) -> "TrainerInput":
        """Read the file written by :meth:`text`."""
        return cls.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))

    def text(self) -> str:
        """This input as YAML."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches of a data-parallel rank in one step."""
        return self.train.global_batch // self.train.layout.data // self.micro_batch
