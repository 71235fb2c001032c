"""The training loop by itself: what it makes of the losses and judgements that it is given."""

import math
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from onnxgrad_cli.training.loop import Loop


class Folder:
    """A run's folder that only remembers at which epochs it was told of a best one."""

    def __init__(self):
        self.saved = []

    @contextmanager
    def log(self, steps):
        yield Mock()

    def save(self, values, said, best=False):
        self.saved.append((len(said["run"]["epochs"]), best))


def loop(judgements, *, higher=False, patience=None, stop=lambda: False):
    """A loop of one batch an epoch, whose epochs are judged as given."""
    told = iter(judgements)
    trainer = SimpleNamespace(steps=0, buffers={}, roles=Mock(adapters=[]), weights=dict, state=dict)

    def step(batch, rate):
        trainer.steps += 1
        return 1.0

    def evaluate(buffers):
        return {"loss": next(told)}

    class Batches:
        position = 0

        def __iter__(self):
            yield SimpleNamespace(indices=None, whole=4)

        def state(self):
            return {}

    trainer.step = step
    evaluate.names = ["loss"]
    schedule = SimpleNamespace(rate=lambda steps: 0.1, observe=lambda value: None, state=dict)
    data = SimpleNamespace(batch=lambda indices: {})
    return Loop(
        trainer=trainer, data=data, batches=Batches(), schedule=schedule, evaluator=evaluate, watched="val_loss",
        higher=higher, epochs=len(judgements), patience=patience, save_every=0, folder=Folder(), stop=stop,
        watch=lambda steps, loss: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("judgements", "higher", "best"),
    [
        ([3.0, 2.0, 2.0, 2.5], False, [True, True, False, False]),
        ([0.5, 0.7, 0.7, 0.6], True, [True, True, False, False]),
        ([math.nan, 2.0, math.inf], False, [False, True, False]),
        ([2.0, math.nan, 1.0], False, [True, False, True]),
    ],
    ids=["lower is better", "higher is better", "the first is no number", "a later one is no number"],
)
def test_of_equal_epochs_the_first_is_the_best(judgements, higher, best):
    run = loop(judgements, higher=higher)
    assert run.run() == "done"
    assert run.folder.saved == [(epoch, better) for epoch, better in enumerate(best, 1)]
    assert run.progress.best == max(epoch for epoch, better in enumerate(best, 1) if better)


@pytest.mark.parametrize(("patience", "epochs"), [(1, 2), (2, 3), (None, 5)])
def test_an_epoch_that_ties_with_the_best_costs_patience(patience, epochs):
    run = loop([2.0] * 5, patience=patience)
    assert run.run() == ("done" if patience is None else "no better")
    assert len(run.progress.epochs) == epochs
