"""The training loop by itself: what it makes of the losses and judgements that it is given."""

import math
import re
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from onnxgrad_cli.checkpoints.validate_checkpoint import ANEW
from onnxgrad_cli.errors import OnnxgradError, UsageError, unwritable
from onnxgrad_cli.metadata import Quantized
from onnxgrad_cli.training.loop import TrainingLoop
from onnxgrad_cli.training.run.watch import Judged, Stepped, unwatched
from onnxgrad_cli.training.steps.base import NotFinite
from tests.facts import raises


class Folder:
    """A run's folder that only remembers at which epochs it was told of a best one."""

    def __init__(self):
        self.saved = []

    @contextmanager
    def log(self, steps, forms, results):
        yield Mock()

    def save(self, values, said, best=False):
        self.saved.append((len(said["run"]["epochs"]), best))


def loop(judgements, *, higher=False, patience=None, stop=lambda: False):
    """A loop of one batch an epoch, whose epochs are judged as given."""
    told = iter(judgements)
    trainer = SimpleNamespace(
        steps=0, buffers={}, roles=Mock(adapters=[], quantized=Quantized()), weights=dict, state=dict
    )

    def step(batch, schedule, uncounted):
        trainer.steps += 1
        return 1.0

    def evaluate(buffers):
        return {"loss": next(told)}

    class Batches:
        position = 0

        def __iter__(self):
            yield SimpleNamespace(indices=None, whole=4)

        def __len__(self):
            return 1

        def state(self):
            return {}

    trainer.step = step
    evaluate.names = ["loss"]
    schedule = SimpleNamespace(rate=lambda steps: 0.1, observe=lambda value: None, state=dict)
    data = SimpleNamespace(batch=lambda indices, part=None: {})
    return TrainingLoop(
        trainer=trainer, data=data, batches=Batches(), schedule=schedule, evaluator=evaluate, watched="val_loss",
        higher=higher, epochs=len(judgements), patience=patience, save_every=0, folder=Folder(), stop=stop,
        watch=unwatched,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("judgements", "higher", "best"),
    [
        ([3.0, 2.0, 2.0, 2.5], False, [True, True, False, False]),
        ([0.5, 0.7, 0.7, 0.6], True, [True, True, False, False]),
        ([math.nan, 2.0, math.inf], False, [False, True, False]),
        ([2.0, math.nan, 1.0], False, [True, False, True]),
    ],
    ids=["lower is better", "higher is better", "the first is not a number", "a later one is not a number"],
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


class Steps:
    """Two batches an epoch, of 3 samples and 1, whose losses are told: what the loop asks of the rest is written down.

    The weight w is the count of steps; the rate is a tenth of it; a loss of None is a step that fails.
    """

    def __init__(self, losses, **changes):
        self.losses, self.log, self.checkpoints, self.watched, self.observed = losses, Mock(), [], [], []
        self.w = np.zeros(2, np.float32)
        self.fed = []
        self.trainer = SimpleNamespace(
            roles=SimpleNamespace(
                reduction="mean", losses=[], adapters=[], averages={"w": "w_ema"}, quantized=Quantized()
            ),
            steps=0, buffers="buffers", step=self.step, weights=lambda: {"w": self.w},
            state=lambda: {"m": np.float32(0.5)}, load=Mock(),
        )  # fmt: skip
        self.position, self.dealt, self.restore = 0, 6, Mock()
        folder = SimpleNamespace(
            path="runs/a", begun=False, log=self.opened, load=lambda: self.checkpoint,
            save=lambda values, said, best=False: self.checkpoints.append((dict(values), said, best)),
        )  # fmt: skip
        schedule = SimpleNamespace(
            rate=lambda steps: steps / 10, observe=self.observed.append, state=lambda: "schedule", restore=Mock()
        )
        given = {
            "trainer": self.trainer, "data": SimpleNamespace(batch=lambda indices, part=None: indices.tolist()),
            "batches": self,
            "schedule": schedule, "evaluator": None, "watched": "loss", "higher": False, "epochs": len(losses) // 2,
            "patience": None, "save_every": 0, "folder": folder, "stop": lambda: False,
            "watch": self.watched.append, "model": "a model", "base": "a base",
            "digests": {"training": "d1"},
        }  # fmt: skip
        self.loop = TrainingLoop(**{**given, **changes})

    @contextmanager
    def opened(self, steps, forms, results):
        assert steps == 0 and not forms
        yield self.log

    def __iter__(self):
        for self.position, indices, whole in ((3, [2, 0, 1], 3), (0, [3], 1)):
            yield SimpleNamespace(indices=np.array(indices), whole=whole)

    def __len__(self):
        return 2

    def state(self):
        return {"position": self.position}

    def step(self, batch, schedule, uncounted):
        assert not uncounted
        self.fed.append((batch, schedule.rate(self.trainer.steps)))
        loss = self.losses[self.trainer.steps]
        if loss is None:
            raise NotFinite("the loss is nan")
        self.trainer.steps += 1
        self.w = self.w + 1
        return loss

    def lines(self):
        return [
            {key: value for key, value in call.args[0].items() if key != "seconds"} for call in self.log.add.mock_calls
        ]


def evaluator(results):
    """An evaluator of the loss alone, which gives these in turn."""
    told = iter(results)
    evaluate = Mock(side_effect=lambda buffers: {"loss": next(told)})
    evaluate.names = ["loss"]
    return evaluate


def test_each_step_is_fed_logged_and_watched_and_an_epoch_has_the_mean_over_its_samples():
    evaluate = evaluator([5.0, 4.0])
    run = Steps([1.0, 2.0, 3.0, 7.0], evaluator=evaluate)
    assert run.loop.run() == "done"
    assert run.fed == [([2, 0, 1], 0.0), ([3], 0.1), ([2, 0, 1], 0.2), ([3], 0.3)]
    stepped = [event for event in run.watched if isinstance(event, Stepped)]
    assert stepped == [
        Stepped(1, 4, 1, 2, 1.0, 0.0), Stepped(2, 4, 1, 2, 2.0, 0.1),
        Stepped(3, 4, 2, 2, 3.0, 0.2), Stepped(4, 4, 2, 2, 7.0, 0.3),
    ]  # fmt: skip
    first, second = {"loss": 1.25, "val_loss": 5.0}, {"loss": 4.0, "val_loss": 4.0}
    assert run.lines() == [
        {"step": 1, "epoch": 1, "loss": 1.0, "rate": 0.0},
        {"step": 2, "epoch": 1, "loss": 2.0, "rate": 0.1},
        {"step": 2, "epoch": 1, **first},
        {"step": 3, "epoch": 2, "loss": 3.0, "rate": 0.2},
        {"step": 4, "epoch": 2, "loss": 7.0, "rate": 0.3},
        {"step": 4, "epoch": 2, **second},
    ]
    assert all(0 <= call.args[0].get("seconds", 0) < 10 for call in run.log.add.mock_calls)
    assert sum("seconds" in call.args[0] for call in run.log.add.mock_calls) == 4
    assert run.observed == [5.0, 4.0]
    judged = [event for event in run.watched if isinstance(event, Judged)]
    assert [(e.step, e.epoch, e.rate, e.results, e.ends, e.best) for e in judged] == [
        (2, 1, 0.1, first, True, True), (4, 2, 0.3, second, True, False)
    ]  # fmt: skip
    assert all(e.speed > 0 and e.steps == 4 and e.epochs == 2 for e in judged)
    assert judged[0].left > 0 == judged[1].left
    evaluate.assert_called_with("buffers")


def test_a_checkpoint_says_all_that_it_takes_to_go_on():
    run = Steps([1.0, 2.0])
    run.loop.run()
    ((values, said, best),) = run.checkpoints
    assert not best and sorted(values) == ["m", "w"] and values["w"].tolist() == [2, 2]
    progress = {"epochs": [{"loss": 1.25}], "best": 0, "total": 0.0, "seen": 0, "uncounted": 0, "ended": ""}
    assert said == {
        "steps": 2, "batches": {"position": 0}, "schedule": "schedule", "run": progress, "weights": ["w"],
        "adapters": [], "model": "a model", "base": "a base", "rates": "", "watched": "loss", "settings": {},
        "data": {"training": "d1"}, "averages": {"w": "w_ema"}, "quantized": asdict(Quantized()),
    }  # fmt: skip
    run.log.write.assert_called_once_with()


def test_checkpoints_within_an_epoch():
    run = Steps([1.0] * 6, save_every=3)
    run.loop.run()
    assert [(said["steps"], best) for _, said, best in run.checkpoints] == [
        (2, False), (3, False), (4, False), (6, False),
    ]  # fmt: skip
    assert run.checkpoints[1][1]["run"] == {
        "epochs": [{"loss": 1.0}],
        "best": 0,
        "total": 3.0,
        "seen": 3,
        "uncounted": 0,
        "ended": "",
    }


@pytest.mark.parametrize(("after", "epochs", "saved"), [(1, 0, [1]), (2, 1, [2, 2]), (3, 1, [2, 3])])
def test_an_end_that_was_asked_for_comes_after_the_step_and_is_saved(after, epochs, saved):
    run = Steps([1.0] * 4)
    run.loop.stop = lambda: run.trainer.steps >= after
    assert run.loop.run() == "stopped"
    assert run.trainer.steps == after and len(run.loop.progress.epochs) == epochs
    assert [said["steps"] for _, said, _ in run.checkpoints] == saved


@pytest.mark.parametrize(
    ("begun", "where"), [(False, "there is no checkpoint yet"), (True, "'runs/a' has the last good checkpoint")]
)
def test_a_loss_that_is_no_number_names_the_step_and_its_samples(begun, where):
    run = Steps([1.0, None])
    run.loop.folder.begun = begun
    with raises(OnnxgradError, "not_finite", "2", "3") as failed:
        run.loop.run()
    assert failed.value.hint.startswith(f"{TrainingLoop.SHORTER}, or ") and failed.value.hint.endswith(f"; {where}")


@pytest.mark.parametrize("loss", ["nan", "inf"])
def test_the_origin_of_such_a_loss_is_looked_for_with_the_loss(loss):
    run = Steps([None], epochs=1)
    run.trainer.step = Mock(side_effect=NotFinite(f"the loss is {loss}"))
    origins = []
    run.loop.origin_of = lambda batch, value: origins.append(str(value)) or ("h", "Sqrt")
    with raises(OnnxgradError, "not_finite", "1", "2", "0", "1", "h") as failed:
        run.loop.run()
    assert origins == [loss] and "domain" in failed.value.hint


@pytest.mark.parametrize(("count", "end"), [(8, "7"), (9, "7, ...")])
def test_of_many_samples_eight_are_named(count, end):
    run = Steps([None], epochs=1)
    batches = Mock(position=0)
    batches.__iter__ = lambda self: iter([SimpleNamespace(indices=np.arange(count), whole=count)])
    run.loop.batches = batches
    with raises(OnnxgradError, "not_finite", "1", *"01234567") as failed:
        run.loop.run()
    assert failed.value.message.endswith(f"6, {end}")


def test_weights_that_are_no_longer_finite_are_not_saved():
    run = Steps([1.0, 2.0])
    run.w = np.float32([0, np.inf])
    with raises(OnnxgradError, "not_finite", "2", "w") as failed:
        run.loop.run()
    assert failed.value.hint.startswith(f"{TrainingLoop.SHORTER}; ")
    assert not run.checkpoints


@pytest.mark.parametrize(
    ("begun", "how"),
    [
        (False, "start again: there is no checkpoint yet"),
        (True, "continue with `resume`: 'runs/a' has the last good checkpoint"),
    ],
)
def test_what_cannot_be_written_says_how_to_go_on(begun, how):
    run = Steps([1.0, 2.0])
    run.loop.folder.begun = begun
    run.loop.folder.save = Mock(
        side_effect=unwritable(
            "no space for 'a'",
            "free space",
        )
    )
    with raises(OnnxgradError, "unwritable_file", "2", "a") as failed:
        run.loop.run()
    assert failed.value.hint == f"free space; then {how}"


def checkpoint(**changes):
    progress = {"epochs": [{"loss": 1.0, "val_loss": 2.0}], "best": 1, "total": 3.0, "seen": 4}
    said = {
        "steps": 6,
        "batches": "place",
        "schedule": "rates",
        "run": progress,
        "adapters": [],
        "model": "a model",
        "watched": "loss",
        "data": {"training": "d1"},
    }
    return {"w": np.ones(2), "m": np.ones(1)}, {**said, **changes}


def test_a_run_goes_on_where_its_checkpoint_was():
    run = Steps([], evaluator=evaluator([]))
    run.checkpoint = values, said = checkpoint()
    run.loop.resume()
    run.trainer.load.assert_called_once_with(values, 6)
    run.loop.batches.restore.assert_called_once_with("place")
    run.loop.schedule.restore.assert_called_once_with("rates")
    assert vars(run.loop.progress) == {**said["run"], "uncounted": 0, "ended": ""}


@pytest.mark.parametrize(
    ("without", "changes", "named", "advised"),
    [
        ("w", {}, ["w"], []),
        ("m", {}, ["m"], []),
        ("", {"adapters": [{"weight": "w"}]}, [], ["lora"]),
        ("", {"model": "another"}, [], ["onnxgrad export"]),
        ("", {"run": {"epochs": [{"loss": 1.0, "val_f1": 2.0}]}}, ["val_f1", "val_loss"], ["val", "metrics"]),
        ("", {"watched": "val_f1"}, ["val_f1"], ["metrics"]),
        ("", {"data": {"training": "d2"}}, [], ["new_data"]),
    ],
)
def test_a_run_does_not_go_on_as_another(without, changes, named, advised):
    run = Steps([], evaluator=evaluator([]))
    values, said = checkpoint(**changes)
    values.pop(without, None)
    run.checkpoint = values, said
    with raises(UsageError, "mismatch", *named) as refused:
        run.loop.resume()
    assert re.findall("`(.*?)`", refused.value.hint.removesuffix(f", or {ANEW}")) == advised
    run.trainer.load.assert_not_called()


def test_steps_that_do_not_lead_to_the_place_are_damage():
    run = Steps([], evaluator=evaluator([]))
    run.checkpoint = checkpoint(steps=7)
    with raises(OnnxgradError, "unreadable_file", "7", "6"):
        run.loop.resume()


def test_a_run_without_validation_goes_on_as_one():
    run = Steps([])
    run.checkpoint = checkpoint()
    with raises(UsageError, "mismatch", "val_loss"):
        run.loop.resume()
    run.checkpoint[1]["run"]["epochs"] = []
    run.loop.resume()


def test_a_run_goes_on_with_other_training_data_on_purpose_alone():
    run = Steps([], evaluator=evaluator([]))
    run.checkpoint = checkpoint(data={"training": "d2"})
    run.loop.resume(new_data=True)
    run.trainer.load.assert_called_once()
    run.loop.digests = {"training": "d1", "validation": "v1"}
    with pytest.raises(UsageError, match=" validation ") as refused:
        run.loop.resume(new_data=True)
    assert refused.value.code == "mismatch" and "new_data" not in refused.value.hint


@dataclass
class Adapter:
    """What a checkpoint tells of an adapter: its fields."""

    weight: str


def test_a_run_goes_on_with_the_same_adapters():
    run = Steps([1.0, 2.0])
    run.trainer.roles.adapters = [Adapter("w")]
    run.loop.run()
    assert run.checkpoints[0][1]["adapters"] == [{"weight": "w"}]
    run.loop.evaluator = evaluator([])
    run.checkpoint = checkpoint(adapters=[{"weight": "w"}])
    run.loop.resume()


def test_the_log_has_the_seconds_of_a_step_to_the_microsecond(monkeypatch):
    run = Steps([1.0, 2.0])
    monkeypatch.setattr("onnxgrad_cli.training.loop.time", Mock(perf_counter=Mock(side_effect=[5, 5.12345678, 6, 8])))
    run.loop.run()
    seconds = [call.args[0]["seconds"] for call in run.log.add.mock_calls if "seconds" in call.args[0]]
    assert seconds == [0.123457, 2]


def test_a_judgement_within_an_epoch_is_told_and_logged_and_decides_nothing():
    run = Steps([3.0, 2.0, 3.0, 2.0], evaluator=evaluator([1.0, 5.0, 0.5, 4.0]), eval_every=1, watched="val_loss")
    assert run.loop.run() == "done"
    assert [line for line in run.lines() if "rate" not in line] == [
        {"step": 1, "epoch": 1, "val_loss": 1.0}, {"step": 2, "epoch": 1, "loss": 2.75, "val_loss": 5.0},
        {"step": 3, "epoch": 2, "val_loss": 0.5}, {"step": 4, "epoch": 2, "loss": 2.75, "val_loss": 4.0},
    ]  # fmt: skip
    told = [(e.step, e.results, e.ends, e.best) for e in run.watched if isinstance(e, Judged)]
    assert told[::2] == [(1, {"val_loss": 1.0}, False, False), (3, {"val_loss": 0.5}, False, False)]
    assert run.observed == [5.0, 4.0] and run.loop.progress.best == 2


def test_a_run_of_so_many_steps_ends_within_an_epoch_which_no_checkpoint_counts():
    run = Steps([1.0, 2.0, 3.0, 7.0], evaluator=evaluator([5.0, 4.0]), max_steps=3, watched="val_loss")
    assert run.loop.run() == "max steps" and run.loop.steps == 3
    assert run.loop.progress.epochs == [{"loss": 1.25, "val_loss": 5.0}, {"loss": 3.0, "val_loss": 4.0}]
    assert run.loop.progress.best == 2
    assert [(said["steps"], best) for _, said, best in run.checkpoints] == [(2, True), (3, False)]
    said = run.checkpoints[-1][1]["run"]
    judged = [{"loss": 1.25, "val_loss": 5.0}]
    assert said == {"epochs": judged, "best": 1, "total": 9.0, "seen": 3, "uncounted": 0, "ended": ""}
    run.loop.take_best()  # the weights of now, which stand in no file as the best
    run.trainer.load.assert_not_called()


@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (2, 1), (3, 2), (4, 2), (None, 2)])
def test_the_epochs_that_are_told_are_those_that_so_many_steps_reach(steps, epochs):
    run = Steps([1.0] * 4, max_steps=steps)
    run.loop.run()
    assert {event.epochs for event in run.watched} == {epochs}


@pytest.mark.parametrize(("steps", "taken", "reason"), [(2, 2, "max steps"), (4, 4, "done"), (9, 4, "done")])
def test_a_run_of_as_many_steps_as_epochs_have_is_a_run_of_epochs(steps, taken, reason):
    run = Steps([1.0] * 4, max_steps=steps)
    assert run.loop.run() == reason and run.loop.steps == taken
    assert [said["steps"] for _, said, _ in run.checkpoints] == list(range(2, taken + 1, 2))
    assert len(run.loop.progress.epochs) == taken // 2
