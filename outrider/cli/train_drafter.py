"""`outrider train-drafter`: a DSpark drafter for any target, from the target's own answers. Resumable in every stage."""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.cli.arguments import TrainDrafter
from outrider.cli.checkpoints import resolve_checkpoint
from outrider.cli.runtime import set_threads
from outrider.engine.load import load_vocabulary, resolve_device, resolve_dtype, resolve_model_len
from outrider.errors import CheckpointError, ConfigError, UnsupportedError
from outrider.models.kimi_k3.model import KimiK3Model
from outrider.models.llama.model import LlamaModel
from outrider.models.registry import load_target
from outrider.tokenizer import Tokenizer, answer_stop_ids
from outrider.training.collecting import CollectedFiles, Collector, CollectorSettings
from outrider.training.drafter_data import Collection
from outrider.training.drafter_trainer import DrafterTrainer, FrozenTables, Quality, TrainerSettings, TrainingRecord
from outrider.training.dspark import DrafterConfig
from outrider.training.export import deepspec_drafter_config, read_flat_drafter, write_flat_drafter
from outrider.training.prompts import file_prompts, read_questions, self_questions

__all__ = ["run_train_drafter"]

logger = logging.getLogger(__name__)

TAP_SHARES = (0.04, 0.28, 0.52, 0.76, 0.96)  # of the depth, as published drafters tap
EVALUATE_EVERY = 200  # steps
Target = KimiK3Model | LlamaModel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What is trained, resolved."""

    target: Target
    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]
    name: str
    context: int


def run_train_drafter(command: TrainDrafter) -> int:
    """Collect, train, write; returns the exit status."""
    if command.steps < 1 or command.tokens < 1:
        raise ConfigError(f"steps={command.steps} and tokens={command.tokens} must be 1 or more")
    out = Path(command.out)
    work = Path(command.work) if command.work else out.parent / f"{out.name}.work"
    if (work / "checkpoint.pt").is_file() and not command.resume:
        raise CheckpointError(f"{work} holds a training that was begun; add --resume, or name another --out")
    set_threads(command.threads)
    job = _load(command)
    config, taps = _config(command, job), _taps(command, job)
    console = Console(stderr=True)
    _collect(command, job, taps, work, console)
    collection = Collection(work)
    draft_ids = collection.frequent_ids(
        config.target_vocab_size, config.draft_vocab_size, job.stop_token_ids & set(range(job.target.vocab_size))
    )
    console.print(
        f"{collection.num_output_tokens} output tokens, {100 * collection.coverage(draft_ids):.2f} % of them in the "
        f"draft vocabulary of {len(draft_ids)}"
    )
    settings = TrainerSettings(num_steps=command.steps, learning_rate=command.learning_rate)
    trainer = DrafterTrainer(config, _tables(job.target), collection, draft_ids, settings, work)
    if not trainer.resume() and command.init:
        weights, known_ids = read_flat_drafter(resolve_checkpoint(command.init))
        trainer = DrafterTrainer(config, _tables(job.target), collection, known_ids, settings, work)
        trainer.start_from(weights, Path(command.init))
    quality = _train(trainer, work, console)
    write_flat_drafter(
        trainer.drafter,
        trainer.draft_ids,
        out,
        config=deepspec_drafter_config(config, num_target_layers=job.target.num_layers, max_positions=job.context),
    )
    print(json.dumps({"out": str(out), "steps": trainer.step, **asdict(quality)}))
    return 0


def _load(command: TrainDrafter) -> _Job:
    path = resolve_checkpoint(command.target)
    tokenizer, eos_ids = load_vocabulary(path)
    if tokenizer is None:
        raise UnsupportedError(f"{path} holds no tokenizer, which prompts need")
    target = load_target(path, dtype=resolve_dtype(path, None), device=resolve_device("cpu"))
    if not isinstance(target, Target):
        raise UnsupportedError(f"{path.name} is of a family that drafters are not trained for here")
    return _Job(
        target=target,
        tokenizer=tokenizer,
        stop_token_ids=eos_ids | set(answer_stop_ids(tokenizer)),
        name=path.name,
        context=resolve_model_len(path, None),
    )


def _taps(command: TrainDrafter, job: _Job) -> tuple[int, ...]:
    if command.taps:
        return tuple(command.taps)
    last = job.target.num_layers - 1
    return tuple(sorted({round(share * last) for share in TAP_SHARES}))


def _config(command: TrainDrafter, job: _Job) -> DrafterConfig:
    """Sizes: the target's width, heads of 64, and what the flags say."""
    target, width = job.target, job.target.hidden_size
    head_dim = command.head_dim
    if width % head_dim and not command.heads:
        raise ConfigError(f"a width of {width} is no multiple of --head-dim {head_dim}; give --heads")
    heads = command.heads or width // head_dim
    kv_heads = command.kv_heads or next(n for n in range(max(1, heads // 3), 0, -1) if heads % n == 0)
    mask = command.mask_token if command.mask_token >= 0 else _mask_token(job)
    return DrafterConfig(
        hidden_size=width,
        num_layers=command.layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=command.intermediate or 8 * width // 3 // 32 * 32,
        block_rows=command.block,
        mask_token_id=mask,
        aux_layer_ids=_taps(command, job),
        target_vocab_size=target.vocab_size,
        draft_vocab_size=min(command.draft_vocab, target.vocab_size),
        markov_rank=command.markov_rank,
        rope_theta=command.rope_theta,
        rms_norm_eps=target.config.rms_norm_eps,
    )


def _mask_token(job: _Job) -> int:
    """The last control token that ends nothing: no text holds it."""
    candidates = sorted(job.tokenizer.control_token_ids - job.stop_token_ids)
    if not candidates:
        raise ConfigError("the tokenizer has no control token to mask with; give --mask-token an id that no text holds")
    return candidates[-1]


def _tables(target: Target) -> FrozenTables:
    return FrozenTables(
        embedding_VD=target.embedding.detach().float(),
        head_VD=target.lm_head.detach().float(),
        norm_D=target.norm.detach().float(),
        eps=target.config.rms_norm_eps,
    )


def _collect(command: TrainDrafter, job: _Job, taps: tuple[int, ...], work: Path, console: Console) -> None:
    settings = CollectorSettings(seats=command.seats, seed=command.seed)
    identity = {
        "target": job.name,
        "aux_layer_ids": list(taps),
        "num_features": len(taps) + 1,
        "hidden_size": job.target.hidden_size,
    }
    files = CollectedFiles(work, identity)
    if files.counts.output_tokens >= command.tokens:
        return
    prompts = _prompts(command, job, files.counts.asked)
    collector = Collector(job.target, taps, job.stop_token_ids, settings, files)
    with _bar("collecting", console) as bar:
        task = bar.add_task("", total=command.tokens, completed=files.counts.output_tokens)

        def tell(num_tokens: int, _seconds: float) -> None:
            bar.update(task, completed=num_tokens)
            logger.info("collected %d of %d output tokens", num_tokens, command.tokens)

        collector.run(prompts, num_tokens=command.tokens, progress=tell)
    files.close()


def _prompts(command: TrainDrafter, job: _Job, num_asked: int) -> Iterator[tuple[int, ...]]:
    seed = f"{command.seed}/{num_asked}"
    if command.prompts:
        return file_prompts(read_questions([Path(name) for name in command.prompts]), job.tokenizer, seed)
    chats = self_questions(job.target, job.tokenizer, job.stop_token_ids, count=max(64, command.tokens // 200))
    return file_prompts(chats, job.tokenizer, seed)


def _train(trainer: DrafterTrainer, work: Path, console: Console) -> Quality:
    quality = trainer.evaluate()
    with (work / "log.jsonl").open("a", encoding="utf-8") as log, _bar("training", console) as bar:
        task = bar.add_task("", total=trainer.settings.num_steps, completed=trainer.step)

        def tell(record: TrainingRecord) -> None:
            line: dict[str, object] = asdict(record)
            if record.step % EVALUATE_EVERY == 0:
                nonlocal quality
                quality = trainer.evaluate()
                line |= asdict(quality)
                logger.info("step %d: %.2f tokens a round held out", record.step, quality.tokens_per_round)
            log.write(json.dumps(line) + "\n")
            log.flush()
            bar.update(task, completed=record.step)

        trainer.run(tell)
    return trainer.evaluate()


def _bar(what: str, console: Console) -> Progress:
    return Progress(
        TextColumn(what), BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip


