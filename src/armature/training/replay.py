"""Replay a training step whose loss or gradient was not finite, to find the first module, rank and
samples.

All ranks replay together, since the step communicates. Nothing of it is kept: random state,
buffers, metrics,
gradients and counted tokens of experts are afterwards as they were before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from armature.errors import error_line
from armature.parallel import process_group, randomness
from armature.strategies.base import StrategyMixin
from armature.strategies.update_mask import buffers_of
from armature.training import epoch_metrics
from armature.training.finite import Finding, FiniteWatch, kind_of
from armature.training.progress import data_of
from armature.training.trainer import Trainer

SHOWN = 8  # samples in a message


@dataclass(frozen=True)
class Replay:
    """What a replay found, for a message and for a file."""

    text: str
    facts: dict[str, Any] = field(default_factory=dict)


class _Unreadable(Exception):
    """A rank cannot read the step's samples; raised by all ranks together."""


def replay(trainer: Trainer, *, position: int) -> Replay:
    """Replay the step at a position in the training samples.

    All ranks call this, and all get the same result.

    Raises:
        RuntimeError: it failed on this one of several ranks, while the others wait in the step's
            collectives.
    """
    strategy, module = StrategyMixin.find(trainer), trainer.lightning_module
    if strategy is None or not strategy.masks_updates:
        name = type(trainer.strategy).__name__
        return Replay(f"The step cannot be replayed: {name} has made its update already.")
    if not module.automatic_optimization:
        return Replay(
            "The step cannot be replayed: the module optimizes manually, and has made its updates "
            "already."
        )
    if data_of(trainer).reads_from_start:
        return Replay("The step is not replayed: an IterableDataset would be read from its start.")
    if (lost := weight_not_finite(strategy)) is not None:
        return Replay(
            f"The step cannot be replayed: weights are not finite any more (the first is {lost}).",
            {"weights": lost},
        )
    try:
        with _undisturbed(trainer, strategy):
            found = _find(trainer, strategy, position=position)
    except _Unreadable as problem:
        return Replay(f"The step cannot be replayed: its samples cannot be read again ({problem}).")
    except Exception as error:
        if trainer.world_size > 1:  # nothing else ends the others' wait
            raise RuntimeError(
                "The loss or a gradient was not finite, and replaying the step failed on rank "
                f"{trainer.global_rank} "
                f"({type(error).__name__})."
            ) from error
        first_line = str(error).partition("\n")[0]
        return Replay(f"Replaying the step failed ({type(error).__name__}: {first_line}).")
    if not found:
        return Replay(
            "Replaying the step gave finite values: either random numbers such as dropout's were "
            "others, or the "
            "weights have changed since."
        )
    ranks = sorted(found, key=lambda rank: (*found[rank].key, rank))
    first = found[ranks[0]]
    same = [
        rank
        for rank in sorted(ranks)
        if (found[rank].place, found[rank].name) == (first.place, first.name)
    ]
    facts = {
        "place": first.place,
        "name": first.name,
        "kind": first.kind,
        "ranks": same,
        "samples": first.samples,
    }
    where = f" on rank {same[0]}" if len(same) == 1 else f" on ranks {', '.join(map(str, same))}"
    where = where if trainer.world_size > 1 else ""
    return Replay(f"Replaying the step found: {first}{where}{_named(first.samples)}.", facts)


def weight_not_finite(strategy: StrategyMixin) -> str | None:
    """Return the name of a weight that is not finite on some rank, the same on all, or None.

    All ranks call it.
    """
    own = next(
        (name for name, param in strategy.weights().items() if kind_of(param.detach()) is not None),
        None,
    )
    return next((name for name in process_group.all_gather_object(own) if name is not None), None)


def _named(samples: list[int]) -> str:
    if not samples:
        return ""
    shown = ", ".join(map(str, samples[:SHOWN])) + (" …" if len(samples) > SHOWN else "")
    return f", in sample{'s' * (len(samples) > 1)} {shown}"


def _find(trainer: Trainer, strategy: StrategyMixin, *, position: int) -> dict[int, Finding]:
    """Return the finding of each rank that has one, in the first micro-batch in which any has."""
    module, loop, data = trainer.lightning_module, trainer.fit_loop.epoch_loop, data_of(trainer)
    rank, pipe = process_group.rank(), strategy.sizes.get("pipe", 1)
    stage = rank // max(1, trainer.world_size // pipe)
    for i, (indices, raw) in enumerate(_read(data, position=position)):
        batch = loop.move_to_device(raw)
        watch = FiniteWatch(indices, stage=stage)
        watch.look_at_batch(batch)
        with watch.in_step(module), _eager(strategy):
            output = loop.forward_again(batch, i)
            loss = output["loss"] if isinstance(output, dict) else output
            if isinstance(loss, Tensor):
                watch.look_at("loss", "", loss)
                module.backward(loss)
        watch.look_at_gradients(module)
        everyones = process_group.all_gather_object(watch.first())
        if found := {rank: each for rank, each in enumerate(everyones) if each is not None}:
            return found
    return {}


def _read(data: Any, *, position: int) -> list[tuple[list[int], Any]]:
    """Return the indices and the batch of each of this rank's micro-batches, before any rank
    computes.
    """
    parts, problem = [], None
    try:
        parts = list(
            zip(data.indices_of_step(position), data.batches_of_step(position), strict=True)
        )
    except Exception as error:
        problem = error_line(error)
    problems = process_group.all_gather_object(problem)
    if (lost := next((each for each in problems if each is not None), None)) is not None:
        raise _Unreadable(lost)
    return parts


def _eager(strategy: StrategyMixin) -> Any:
    """Hooks are not called inside of compiled code."""
    return nullcontext() if strategy.compile == "none" else torch.compiler.set_stance("force_eager")


@contextmanager
def _undisturbed(trainer: Trainer, strategy: StrategyMixin) -> Iterator[None]:
    module = trainer.lightning_module
    modes = {part: part.training for part in module.modules()}
    random_state, metrics = randomness.capture(), epoch_metrics.metric_states(module)
    counted = dict(vars(strategy.target_weights))
    scaled, skips, norm = strategy.gradients_are_scaled, strategy._skips_step, strategy.grad_norm
    if not module.training:  # rows are also read before a validation
        module.train()
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        epoch_metrics.without_logging(module),
        ExitStack() as stack,
    ):
        for part in module.modules():
            if hasattr(part, "counted_passes"):  # a mixture of experts
                stack.enter_context(part.counted_passes(0))  # pyright: ignore[reportCallIssue]
        buffers = [(*each, each[-1].detach().clone()) for each in buffers_of(module)]
        try:
            yield
        finally:
            with torch.no_grad():
                for owner, name, buffer, before in buffers:
                    buffer.copy_(before)
                    setattr(owner, name, buffer)  # the step may have put another tensor there
            for param in module.parameters():
                param.grad = None
            for part, mode in modes.items():
                part.training = mode
            vars(strategy.target_weights).update(counted)
            strategy.gradients_are_scaled, strategy._skips_step, strategy.grad_norm = (
                scaled,
                skips,
                norm,
            )
            one = {"rank": 0, "saved_data_ranks": [0], "data_ranks": [0]}
            epoch_metrics.restore_states(module, [metrics], **one)
            randomness.restore(random_state)
