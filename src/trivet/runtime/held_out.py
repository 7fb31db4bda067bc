"""Loss on held-out examples: packs of a build, or tasks with answers. Nothing is sampled or trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from trivet.data.sft import ExampleDropped, sft_group
from trivet.data.shards import PackedData, ShardError
from trivet.recipe.supervised import HeldOut
from trivet.render import Renderer
from trivet.runtime.build import SetupError
from trivet.runtime.packs import load_packs
from trivet.runtime.stop import Stopped, StopRequest
from trivet.types import Group, IssueKey, Task

if TYPE_CHECKING:
    from trivet.algorithms import Batch
    from trivet.trainer import Trainer
    from trivet.trainer.labels import Labels

_TOGETHER = 64  # examples of tasks that are collated at once


class HeldOutLoss:
    """Measures the loss of a stage's held-out data: the mean of -log p over trained tokens, by loss weight.

    `pieces` batches, each made when it is needed; always the same ones in the same order.
    """

    def __init__(
        self, config: HeldOut, pieces: int, piece: Callable[[int], tuple[Batch, Labels]], stop: StopRequest
    ) -> None:
        self.config, self.pieces, self._piece, self._stop = config, pieces, piece, stop
        self.measured = -1  # the step it was last measured after

    @classmethod
    def of_packs(cls, config: HeldOut, data: PackedData, stop: StopRequest) -> HeldOutLoss:
        """Raises ShardError where there is nothing to measure."""
        if not len(data):
            raise ShardError(f"{data.folder} holds no packs to measure a held-out loss on")

        def piece(index: int) -> tuple[Batch, Labels]:
            from trivet.trainer.packs import collate_packs

            return collate_packs(load_packs(data, [index]))

        return cls(config, min(len(data), config.limit or len(data)), piece, stop)

    @classmethod
    def of_tasks(
        cls,
        config: HeldOut,
        held: Sequence[tuple[str, Sequence[Task]]],
        renderer: Renderer,
        stop: StopRequest,
        *,
        max_length: int | None,
        warn: Callable[[str, str], None],
    ) -> HeldOutLoss:
        """Of tasks with answers, rendered once; each taskset is a source. Raises SetupError where none can be
        measured."""
        groups: list[tuple[str, Group]] = []
        for name, task in ((name, task) for name, tasks in held for task in tasks):
            if config.limit is not None and len(groups) >= config.limit:
                break
            key = IssueKey(task.id, 0)
            try:
                group = sft_group(task, renderer, key, group_id=f"held_out/{key}", max_length=max_length)
            except ExampleDropped as reason:
                warn(f"held_out_{reason.cause}", f"held-out example {key}: {reason}")
                continue
            groups.append((name, group))
        if not groups:
            raise SetupError("held_out.tasks: not one example can be measured; the warnings say why")

        def piece(index: int) -> tuple[Batch, Labels]:
            from trivet.trainer import collate

            some = groups[index * _TOGETHER : (index + 1) * _TOGETHER]
            return collate([group for _, group in some]), {"source": [name for name, _ in some]}

        return cls(config, -(-len(groups) // _TOGETHER), piece, stop)

    def due(self, step: int, last: bool = False) -> bool:
        """At step 0 (unless switched off), every `every` steps and at the stage's end; once a step."""
        if step == self.measured:
            return False
        return self.config.at_start if step == 0 else last or step % self.config.every == 0

    def measure(self, trainer: Trainer, advance: Callable[[int], None]) -> dict[str, float]:
        """loss, loss/source/NAME, loss/category/NAME, tokens. Raises Stopped between two batches."""
        import numpy as np

        from trivet.trainer.labels import LossByLabel

        sums, tokens = LossByLabel({"source": (), "category": ()}), 0
        for batch, labels in self._batches():
            trainer.annotate(batch, {"proximal_logp"})
            index_P = np.flatnonzero((batch.train_T > 0) & (batch.position_T > 0))
            sums.observer(batch, batch.train_T.astype(np.float64), labels)(
                index_P, batch.annotations["proximal_logp"][index_P]
            )
            tokens += len(index_P)
            advance(1)
        loss = {"loss": sums.loss / sums.weight} if sums.weight else {}
        by_label = {f"loss/{name}": value for name, value in sums.metrics().items()}
        return {**loss, **by_label, "tokens": float(tokens)}

    def _batches(self) -> Iterator[tuple[Batch, Labels]]:
        for index in range(self.pieces):
            if self._stop:
                raise Stopped(f"stopped by {self._stop.reason}")
            yield self._piece(index)
