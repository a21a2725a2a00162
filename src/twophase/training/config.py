"""The configuration of a language-model run (no torch here, so that the command line and the sweeps stay quick)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from twophase.base.config import LATER, UsageError, fingerprint, to_tree
from twophase.policies.base import RestartPolicy
from twophase.policies.text import parse
from twophase.rule import Form, OuterRule, check_rule

VOCABULARY_SIZES = {"char": 96, "bytes": 256}


LARGEST_LR = 1e30
"""What a float32 holds with room to spare; a larger factor fails inside of torch."""


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-like decoder."""

    layers: int = 2
    """Number of decoder blocks."""
    hidden_size: int = 32
    """Width of the residual stream."""
    intermediate_size: int = 88
    """Width of the SwiGLU."""
    heads: int = 2
    """Query heads; head size = hidden_size / heads, which must be even."""
    kv_heads: int = 0
    """Key and value heads (grouped-query attention); 0 means as many as heads."""
    tie_embeddings: bool = False
    """Use the embedding matrix as the output head."""
    rope_theta: float = 10000.0
    """Base of the rotary position embedding."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    vocabulary_size: int = 0
    """Rows of embedding and head; 0 means as many as the data's vocabulary has, and it may not have fewer."""


@dataclass(frozen=True)
class DataConfig:
    """Text, tokens and batches."""

    corpus: str = "python"
    """`python` (documentation and docstrings of the running Python), `python-code` (functions and classes of its
    library), `file:PATH` (text, or JSON lines, gzip too), or `tokens:PATH` (a folder of `twophase data prepare`, or
    nanoGPT-style .bin files)."""
    vocabulary: Literal["char", "bytes"] = "char"
    """`char` (95 printable ASCII characters and newline) or `bytes` (256); tokens: brings its own."""
    tokenizer: str = ""
    """The tokenizer that tokens: must have been made with: its name, such as mistral, or 8 or more digits of its
    SHA-256; empty takes any."""
    sequence_length: int = 64
    """Tokens of a training sequence."""
    batch_size: int = 8
    """Sequences a replica and inner step."""
    held_out: float = 0.08
    """Share of the documents that is held out for validation; tokens: brings its own validation split."""
    validation_windows: int = 256
    """Sequences of a validation, spread evenly over the held-out text."""


@dataclass(frozen=True)
class InnerConfig:
    """The inner optimizer: AdamW with linear warmup, then a schedule over the rest of the run."""

    lr: float = 2e-3
    """Peak inner learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment coefficients."""
    warmup: float = 0.1
    """Share of the inner steps that is linear warmup."""
    clip_norm: float = 0.0
    """Bound on the gradient norm; 0 means none."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = field(default="cosine", metadata=LATER)
    """What follows the warmup: cosine or linear decay to zero at the run's end, constant, or wsd (warmup, stable,
    decay): constant, then linear decay."""
    decay: float = field(default=0.2, metadata=LATER)
    """Share of the inner steps, at the run's end, over which wsd decays."""


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimizer: how the replicas' progress is combined once a round."""

    lr: float = 0.7
    """Outer learning rate, in the form named below."""
    momentum: float = 0.9
    """Outer momentum, in [0, 1)."""
    nesterov: bool = True
    """Look ahead (Nesterov) instead of heavy ball."""
    form: Form = "sum"
    """`sum` (as torch.optim.SGD) or `ema` (as the restart paper); lr_sum = lr_ema (1 - momentum)."""
    restart: str = "never"
    """When the momentum restarts: never, a period such as 3, cycle:5,6,10, at:4,9, soft:3:0.2:0.1, or a policy that
    decides for itself: auto, gradient, loss, probe:keep,average and more."""
    probe_sequences: int = field(default=0, metadata=LATER)
    """Sequences on which a policy that probes weighs its candidates: the first ones of each replica's next batch; 0
    means all of it. Other policies do not look at it."""

    def rule(self) -> OuterRule:
        """The rule as a value; one with a momentum where the policy needs a buffer of its own."""
        return self.policy().effective(OuterRule(self.lr, self.momentum, self.nesterov, self.form))

    def policy(self) -> RestartPolicy:
        """The restart policy as a value."""
        return parse(self.restart)


@dataclass(frozen=True)
class SyncConfig:
    """When the replicas' progress is combined, and how it travels."""

    fragments: tuple[str, ...] = ("1",)
    """A number of fragments of about equal size, each with its own outer optimizer and rounds; or NAME=PATTERN for
    each, such as ends=embedding|head blocks=blocks: a parameter takes the first pattern that its name contains."""
    restart: tuple[str, ...] = ()
    """NAME=POLICY for each fragment, such as ends=3 blocks=5; none means outer.restart for all."""
    stagger: bool = True
    """Spread the fragments' syncs evenly over a round; else all come at its end."""
    delay: int = 0
    """Inner steps between the launch of a reduction and its application: the replicas train on meanwhile."""
    mixing: float = 0.0
    """Share of its own parameters that a replica keeps when the anchor comes back, in [0, 1)."""
    wire: Literal["float32", "bfloat16", "int8"] = "float32"
    """What pseudo-gradients travel as; `int8` is in blocks with error feedback. Where all replicas live in one process,
    each counts as a process here."""

    def parts(self) -> int | dict[str, str]:
        """The number of fragments, or their patterns by name."""
        if len(self.fragments) == 1 and self.fragments[0].isdecimal():
            return int(self.fragments[0])
        return _pairs("sync.fragments", self.fragments, "ends=embedding|head blocks=blocks, or one number")

    def policies(self) -> dict[str, RestartPolicy] | None:
        """Each fragment's restart policy by name; None where all have outer.restart."""
        if not self.restart:
            return None
        return {name: parse(text) for name, text in _pairs("sync.restart", self.restart, "ends=3 blocks=5").items()}


def _pairs(path: str, words: tuple[str, ...], example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        _require(bool(name and equals and value), path, word, f"NAME=VALUE, such as {example}")
        _require(name not in pairs, path, word, "a name that has not been given yet")
        pairs[name] = value
    return pairs


@dataclass(frozen=True)
class ComputeConfig:
    """How a step is computed; what it computes stays the same up to rounding."""

    precision: Literal["float32", "bf16-mixed"] = "float32"
    """`bf16-mixed`: weights, gradients' sums and optimizers in float32, everything between them in bfloat16."""
    compile: bool = False
    """Compile forward and backward (torch.compile), once for all replicas and runs of a process."""
    micro_batch: int = 0
    """Sequences a forward and backward pass, a divisor of the batch size; 0 means as many as the memory holds."""
    attention: Literal["auto", "cudnn", "flash3", "flash", "efficient", "math"] = "auto"
    """Attention kernel on a GPU; `auto` times those that there are at the run's shape and takes the fastest, the same
    in all processes. `flash3` is FlashAttention 3, for a newer torch with the package flash_attn_interface."""
    recompute: bool = False
    """Keep only each block's input for the backward pass and compute the rest again (activation checkpointing)."""
    autotune: bool = field(default=False, metadata=LATER)
    """With `compile`, let the compiler time several versions of each product and kernel, which takes minutes once."""


@dataclass(frozen=True)
class TrainConfig:
    """One DiLoCo run of a small language model."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    replicas: int = 2
    """Replicas in the whole run, over all processes."""
    steps: int = 960
    """Inner steps of each replica in the whole run."""
    inner_steps: int = 16
    """Inner steps a round (S; H in DiLoCo papers). The last round is shorter when steps is no multiple of it."""
    seed: int = 0
    """Seeds initial weights and data order."""
    device: str = "cpu"
    """A torch device: cpu, cuda, cuda:1."""
    threads: int = 1
    """CPU threads a process; results are reproducible for a fixed number."""
    deterministic: bool = False
    """On a GPU, use kernels that give the same bits every time only (slower); a CPU always does."""
    repeat: bool = False
    """Let a run read its tokens: more than once when they do not last."""
    log_every: int = 0
    """Inner steps between lines of steps.jsonl (training loss, speed, memory) of `train`; 0 means none. The cells of a
    sweep that share their steps write none."""
    evaluate_every: int = 0
    """Rounds between validations; 0 means at the end only."""
    checkpoint_every: int = 20
    """Rounds between checkpoints."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept; older ones are removed after a newer one is complete."""
    divergence_loss: float = 0.0
    """A round whose mean training loss (nats a token) is above this ends the run; 0 means 3 ln(vocabulary)."""

    @property
    def rounds(self) -> int:
        """Outer rounds of the run, the last and perhaps shorter one included."""
        return math.ceil(self.steps / self.inner_steps)

    @property
    def shares_steps(self) -> bool:
        """Whether the whole model is combined at a round's end, as it is: runs of a sweep share steps only then."""
        sync = self.sync
        return sync.parts() == 1 and sync.delay == 0 and sync.mixing == 0 and not sync.restart

    @property
    def step_tokens(self) -> int:
        """Tokens of an inner step of one replica."""
        return self.data.batch_size * self.data.sequence_length

    @property
    def probed(self) -> int:
        """Sequences of a probe batch where they are fewer than a step's; 0 where they are all of them."""
        count = self.outer.probe_sequences
        return count if count < self.data.batch_size else 0


def text_name(config: TrainConfig) -> str:
    """A name for the text that a run trains on, equal for runs that share it."""
    return fingerprint({"data": to_tree(config.data), "replicas": config.replicas})


def check(config: TrainConfig) -> TrainConfig:
    """Return the configuration if it can be run.

    Raises:
        UsageError: naming the option, its value, the range and the remedy.
    """
    positive = {
        "model.layers": config.model.layers,
        "model.hidden_size": config.model.hidden_size,
        "model.intermediate_size": config.model.intermediate_size,
        "model.heads": config.model.heads,
        "data.sequence_length": config.data.sequence_length,
        "data.batch_size": config.data.batch_size,
        "data.validation_windows": config.data.validation_windows,
        "replicas": config.replicas,
        "steps": config.steps,
        "inner_steps": config.inner_steps,
        "threads": config.threads,
        "checkpoint_every": config.checkpoint_every,
        "keep_checkpoints": config.keep_checkpoints,
    }
    for path, value in positive.items():
        _require(value >= 1, path, value, "a whole number >= 1")
    _check_model(config.model)
    _check_numbers(config)
    _require(
        config.inner_steps <= config.steps,
        "inner_steps",
        config.inner_steps,
        f"at most steps ({config.steps}); lower --inner-steps or raise --steps",
    )
    try:
        check_rule("--outer", config.outer.lr, config.outer.momentum, config.outer.form)
    except ValueError as error:
        raise UsageError(str(error).replace("--outer: ", "--outer.", 1)) from None
    _require(config.outer.lr <= LARGEST_LR, "outer.lr", config.outer.lr, f"at most {LARGEST_LR:g}, far beyond any use")
    try:
        config.outer.policy()
    except ValueError as error:
        raise UsageError(f"--outer.restart: {error}") from None
    _require(
        0 <= config.outer.probe_sequences <= config.data.batch_size,
        "outer.probe_sequences",
        config.outer.probe_sequences,
        f"a whole number from 1 to --data.batch-size {config.data.batch_size}, or 0 (all of the next batch)",
    )
    _check_sync(config)
    return config


def _check_sync(config: TrainConfig) -> None:
    sync = config.sync
    _require(
        0 <= sync.delay < config.inner_steps,
        "sync.delay",
        sync.delay,
        f"at least 0 and below inner_steps ({config.inner_steps}), so that a reduction ends before the next begins",
    )
    _require(0 <= sync.mixing < 1, "sync.mixing", sync.mixing, "at least 0 and below 1")
    parts = sync.parts()
    count, shown = (parts, parts) if isinstance(parts, int) else (len(parts), "empty")
    _require(count >= 1, "sync.fragments", shown, "a whole number >= 1")
    names = {str(number) for number in range(parts)} if isinstance(parts, int) else set(parts)
    try:
        policies = sync.policies()
    except UsageError:
        raise
    except ValueError as error:  # a policy's
        raise UsageError(f"--sync.restart: {error}") from None
    if policies is not None and set(policies) != names:
        raise UsageError(
            f"--sync.restart names {', '.join(sorted(policies))}, and the fragments are {', '.join(sorted(names))}; "
            "give each fragment its policy, on an axis of a sweep with commas between them"
        )


def _check_model(model: ModelConfig) -> None:
    size, heads, kv_heads = model.hidden_size, model.heads, model.kv_heads
    _require(
        size % (2 * heads) == 0, "model.hidden_size", size, f"a multiple of 2 x heads = {2 * heads} (rotary pairs)"
    )
    _require(
        kv_heads >= 0 and (kv_heads == 0 or heads % kv_heads == 0),
        "model.kv_heads",
        kv_heads,
        f"0 (as many as heads) or a divisor of --model.heads {heads}",
    )
    _require(model.rope_theta > 0, "model.rope_theta", model.rope_theta, "above 0")
    _require(model.norm_eps > 0, "model.norm_eps", model.norm_eps, "above 0")


def _check_numbers(config: TrainConfig) -> None:
    inner = config.inner
    _require(0 < config.data.held_out < 1, "data.held_out", config.data.held_out, "between 0 and 1, for example 0.08")
    _require(math.isfinite(inner.lr) and inner.lr > 0, "inner.lr", inner.lr, "a finite number above 0")
    _require(
        math.isfinite(inner.weight_decay) and inner.weight_decay >= 0,
        "inner.weight_decay",
        inner.weight_decay,
        "a finite number >= 0",
    )
    _require(all(0 <= b < 1 for b in inner.betas), "inner.betas", inner.betas, "two numbers in [0, 1)")
    _require(0 <= inner.warmup <= 1, "inner.warmup", inner.warmup, "a share of the steps, in [0, 1]")
    _require(
        inner.schedule == "wsd" or inner.decay == InnerConfig().decay,
        "inner.decay",
        inner.decay,
        f"left alone with --inner.schedule {inner.schedule}; it is for wsd",
    )
    _require(
        0 <= inner.decay <= 1 - inner.warmup or inner.schedule != "wsd",
        "inner.decay",
        inner.decay,
        f"a share of the steps, in [0, 1 - inner.warmup] = [0, {1 - inner.warmup:g}]",
    )
    _require(inner.clip_norm >= 0, "inner.clip_norm", inner.clip_norm, ">= 0 (0 means no clipping)")
    _require(
        config.model.vocabulary_size >= 0,
        "model.vocabulary_size",
        config.model.vocabulary_size,
        ">= 0 (0 means as many as the data's vocabulary has)",
    )
    micro, batch = config.compute.micro_batch, config.data.batch_size
    _require(
        micro >= 0 and (micro == 0 or batch % micro == 0),
        "compute.micro_batch",
        micro,
        f"0 (as many as the memory holds) or a divisor of --data.batch-size {batch}",
    )
    compute = config.compute
    _require(compute.compile or not compute.autotune, "compute.autotune", True, "used together with --compute.compile")
    _require(config.log_every >= 0, "log_every", config.log_every, ">= 0 (0 means no lines inside a round)")
    _require(config.evaluate_every >= 0, "evaluate_every", config.evaluate_every, ">= 0 (0 means at the end only)")
    _require(config.divergence_loss >= 0, "divergence_loss", config.divergence_loss, ">= 0 (0 means 3 ln(vocabulary))")
    _require(0 <= config.seed < 2**63, "seed", config.seed, "a whole number >= 0 and below 2^63")


def _require(holds: bool, path: str, value: object, wanted: str) -> None:
    if not holds:
        option = path.replace("_", "-")
        raise UsageError(f"--{option} is {value}; it must be {wanted}")
