"""halfstep inside Lightning's Trainer and Fabric: the numbers of a loop by hand, resume, and what it refuses."""

import copy
import logging
import runpy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import DataLoader

lightning = pytest.importorskip("lightning", reason="Lightning is not installed; run ./dev adapters")

from lightning.pytorch.callbacks import (  # noqa: E402
    Callback,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger  # noqa: E402

import halfstep  # noqa: E402
from halfstep.adapters import lightning as adapter  # noqa: E402
from halfstep.adapters.lightning import Halfstep  # noqa: E402
from halfstep.errors import SessionError, SetupError  # noqa: E402
from tests.scale.sync import NoSync  # noqa: E402
from tests.trainers.loops import (  # noqa: E402
    ACCUMULATE,
    BAD,
    MAX_NORM,
    SETTINGS,
    bad_at,
    batches,
    by_hand,
    loss_of,
    network,
    optimizer_of,
    same_losses,
    same_weights,
    schedule_of,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning advises on workers, loggers and folders
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
logging.getLogger("lightning.fabric").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self, model=None, optimizer="AdamW", **settings):
        super().__init__()
        self.net = network() if model is None else model
        self.losses, self.norms, self.seen = [], [], []
        self.optimizer, self.settings = optimizer, settings

    def training_step(self, batch, index):
        loss = loss_of(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        self.seen.append(self.net(batch[0]).dtype)
        self.log("val", loss_of(self.net, batch))

    def predict_step(self, batch, index):
        return self.net(batch[0])

    def configure_optimizers(self):
        optimizer = optimizer_of(self.net, self.optimizer, **self.settings)
        return [optimizer], [{"scheduler": schedule_of(optimizer), "interval": "step"}]


class Two(lightning.LightningModule):
    """Two networks, stepped by hand in turn."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(8, 4), nn.Linear(4, 1)

    def training_step(self, batch, index):
        maker, judge = self.optimizers()
        judge.zero_grad()
        self.manual_backward(self.judge(batch[1]).mean() - self.judge(self.maker(batch[0]).detach()).mean())
        self.clip_gradients(judge, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        judge.step()
        maker.zero_grad()
        self.manual_backward(self.judge(self.maker(batch[0])).mean())
        maker.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(self.maker.parameters(), lr=0.01), torch.optim.Adam(self.judge.parameters(), lr=0.01)]


class Kept(Logger):
    """Keeps what it is given to log."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.rows = {}

    def log_metrics(self, metrics, step=None):
        for key, value in metrics.items():
            self.rows.setdefault(key, {})[step] = value

    def log_hyperparams(self, *args, **kwargs):
        pass


def trainer_of(level, low, **settings):
    plugins = settings.pop("plugins", None) or [Halfstep(level, low=low)]
    common = {"logger": False, "enable_checkpointing": False, "max_epochs": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    clip = {"accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": MAX_NORM}
    return lightning.Trainer(plugins=plugins, **{**common, **quiet, **clip, **settings})


def data(level, count=100):
    return DataLoader(batches(count, bad_at(level)), batch_size=None)


def fitted(level, low, module=None, **settings):
    module = Module() if module is None else module
    trainer = trainer_of(level, low, **settings)
    trainer.fit(module, data(level))
    return trainer, module


@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_a_fit_trains_bit_for_bit_as_the_loop_by_hand(level, low):
    trainer, module = fitted(level, low)
    other = by_hand(level, low)
    assert same_losses(module.losses, other.losses)
    assert same_weights(module.net.state_dict(), other.weights)
    assert trainer.global_step == 50
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [other.rates[-1]]
    assert other.skipped == (0 if level == "O0" else 1)
    assert trainer.precision_plugin.state_dict()["skipped"] == other.skipped


@pytest.mark.parametrize(("level", "low"), [("O1", "fp16"), ("O2", "bf16")])
@pytest.mark.parametrize(
    ("name", "settings"), [("AdamW", {"fused": True}), ("SGD", {"momentum": 0.9}), ("RMSprop", {})]
)
def test_fused_and_other_optimizers_are_clipped_and_step_as_by_hand(level, low, name, settings):
    _, module = fitted(level, low, Module(optimizer=name, **settings))
    other = by_hand(level, low, name=name, **settings)
    assert same_weights(module.net.state_dict(), other.weights)


@pytest.mark.parametrize("settings", [{}, {"fused": True}])
@pytest.mark.parametrize(("level", "low"), [("O1", "fp16"), ("O2", "bf16")])
def test_clipping_by_value_is_that_of_the_loop_by_hand(level, low, settings):
    clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    _, module = fitted(level, low, Module(**settings), **clip)
    other = by_hand(level, low, clip=lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01), **settings)
    assert same_weights(module.net.state_dict(), other.weights)


@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_a_run_that_is_stopped_and_resumed_from_lightnings_checkpoint_is_bit_identical(level, low, tmp_path):
    whole = Module()
    trainer_of(level, low, max_epochs=2).fit(whole, data(level, 50))
    first = Module()
    saver = ModelCheckpoint(tmp_path, filename="at", save_top_k=-1)
    trainer_of(level, low, enable_checkpointing=True, callbacks=[saver]).fit(first, data(level, 50))
    second = Module()
    plugin = Halfstep(level, low=low)
    trainer = trainer_of(level, low, max_epochs=2, plugins=[plugin])
    trainer.fit(second, data(level, 50), ckpt_path=tmp_path / "at.ckpt")
    assert same_losses(first.losses + second.losses, whole.losses)
    assert same_weights(second.state_dict(), whole.state_dict())
    assert trainer.global_step == plugin.state_dict()["steps"] == 50
    assert plugin.state_dict()["skipped"] == (0 if level == "O0" else 2)


@pytest.mark.parametrize(("level", "low"), [("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
def test_the_checkpoint_on_disk_holds_fp32_weights_that_a_plain_trainer_takes(level, low, tmp_path):
    trainer, module = fitted(level, low)
    trainer.save_checkpoint(tmp_path / "at.ckpt")
    held = torch.load(tmp_path / "at.ckpt", weights_only=True)
    assert {value.dtype for value in held["state_dict"].values()} == {torch.float32}
    assert held["Halfstep"]["steps"] == 50
    plain = Module()
    lightning.Trainer(
        logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False, max_steps=51
    ).fit(plain, data("O0", 1), ckpt_path=tmp_path / "at.ckpt")
    plain = Module()
    plain.load_state_dict(held["state_dict"])
    assert same_weights(plain.state_dict(), module.state_dict())


def test_scale_skips_and_norm_reach_the_logger_under_the_steps_of_the_trainer():
    logger = Kept()
    fitted("O1", "fp16", logger=logger, log_every_n_steps=1)
    skipped = logger.rows["halfstep/skipped"]
    bad = BAD // ACCUMULATE
    assert {step: float(value) for step, value in skipped.items()} == {step: float(step >= bad) for step in range(50)}
    assert logger.rows["halfstep/bad_losses"] == skipped
    assert (
        logger.rows["halfstep/scale"][bad] == logger.rows["halfstep/scale"][bad + 1]
    )  # which a bad loss does not lower
    norms = logger.rows["halfstep/grad_norm"]
    assert norms[0] > MAX_NORM  # before clipping
    assert not torch.isfinite(torch.tensor(norms[bad]))


def test_only_steps_that_lightning_logs_are_handed_over():
    logger, given = Kept(), []

    class Counts(Module):
        def log_dict(self, values, **settings):
            given.append(self.trainer.global_step)
            super().log_dict(values, **settings)

    fitted("O1", "fp16", Counts(), logger=logger, log_every_n_steps=BAD // ACCUMULATE + 1)
    assert given == [10, 21, 32, 43]
    assert {step: float(value) for step, value in logger.rows["halfstep/skipped"].items()} == {
        10: 1,
        21: 1,
        32: 1,
        43: 1,
    }
    assert torch.isfinite(torch.tensor([logger.rows["halfstep/grad_norm"][step] for step in (21, 32, 43)])).all()


def test_norms_are_those_before_clipping_by_value_too():
    logger, clipped = Kept(), Kept()
    settings = {"log_every_n_steps": 1, "gradient_clip_algorithm": "value", "max_steps": 3}
    fitted("O1", "bf16", logger=logger, gradient_clip_val=1e9, **settings)
    fitted("O1", "bf16", logger=clipped, gradient_clip_val=1e-3, **settings)
    assert clipped.rows["halfstep/grad_norm"][0] == logger.rows["halfstep/grad_norm"][0] > 1e-2


class Both(Two):
    """Clips both before it steps both, and steps one more time where an epoch ends; the loss of one overflows once."""

    def training_step(self, batch, index):
        optimizers = maker, judge = self.optimizers()
        for each in optimizers:
            each.zero_grad()
        for loss in (self.judge(self.maker(batch[0])).mean(), self.judge(batch[1]).square().mean()):
            self.manual_backward(loss * 1e30 if index == 1 else loss)
        self.true = [nn.utils.get_total_norm([p.grad for p in each.parameters()]) for each in (self.maker, self.judge)]
        for each in optimizers:
            self.clip_gradients(each, gradient_clip_val=1e-3, gradient_clip_algorithm="norm")
        judge.step()
        maker.step()

    def on_train_epoch_end(self):
        self.optimizers()[0].step()


def test_several_optimizers_have_their_own_norms_and_no_skip_is_lost():
    logger, module = Kept(), Both()
    trainer = trainer_of(
        "O1", "fp16", logger=logger, log_every_n_steps=2, gradient_clip_val=None, accumulate_grad_batches=1
    )
    trainer.fit(module, data("O0", 4))
    rows = logger.rows
    assert {name for name in rows if name.startswith("halfstep/grad")} == {
        "halfstep/grad_norm/0",
        "halfstep/grad_norm/1",
    }
    for number, norm in enumerate(module.true):
        assert list(rows[f"halfstep/grad_norm/{number}"].values())[-1] == float(norm)
    assert list(rows["halfstep/skipped"].values())[-1] == trainer.precision_plugin.state_dict()["skipped"] >= 2


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_trainer_that_never_logs_is_handed_nothing(by_hand):
    given = []

    class Counts(Two if by_hand else Module):
        def log_dict(self, values, **settings):
            given.append(values)

    clip = {"gradient_clip_val": None, "accumulate_grad_batches": 1} if by_hand else {}
    trainer_of("O1", "bf16", log_every_n_steps=0, **clip).fit(Counts(), data("O0", 4))
    assert not given


def test_a_learning_rate_monitor_and_validation_run_under_the_plan():
    logger = Kept()
    module = Module()
    trainer = trainer_of("O2", "bf16", logger=logger, callbacks=[LearningRateMonitor()], log_every_n_steps=1)
    trainer.fit(module, data("O2"), data("O0", 3))
    assert set(module.seen) == {torch.float32}
    assert set(logger.rows["lr-AdamW"].values()) >= {0.01, 0.008}
    assert "val" in logger.rows
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    predicted = trainer.predict(module, data("O0", 2))
    assert predicted[0].dtype is torch.float32
    assert {p.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_manual_optimization_with_two_optimizers_is_the_loop_by_hand(level, low):
    module, other = Two(), Two()
    trainer_of(level, low, gradient_clip_val=None, accumulate_grad_batches=1).fit(module, data("O0", 20))
    maker, judge = other.configure_optimizers()
    session = halfstep.initialize(other, [maker, judge], level, low=low)
    for batch in batches(20, None):
        judge.zero_grad()
        session.backward(other.judge(batch[1]).mean() - other.judge(other.maker(batch[0]).detach()).mean())
        session.unscale_()
        nn.utils.clip_grad_norm_(other.judge.parameters(), 0.5)
        session.step(judge)
        maker.zero_grad()
        session.backward(other.judge(other.maker(batch[0])).mean())
        session.unscale_()
        session.step(maker)
    assert same_weights(module.state_dict(), other.state_dict())


def test_a_run_whose_steps_keep_being_skipped_ends_with_a_verdict_that_names_the_module():
    class Broken(nn.Module):
        def forward(self, inputs):
            return inputs * torch.inf

    model = nn.Sequential(nn.Linear(8, 8), Broken(), nn.Linear(8, 4))
    module = Module(model)
    with pytest.raises(halfstep.NumericsError, match=r"linear in net\.2"):
        fitted("O1", "bf16", module)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_compiled_modules_train_as_they_do_uncompiled():
    _, module = fitted("O1", "bf16", Module(torch.compile(network(), backend="eager")))
    other = by_hand("O1", "bf16")
    assert same_weights(module.net._orig_mod.state_dict(), other.weights)
    torch._dynamo.reset()


def test_a_compiled_lightning_module_trains_too():
    trainer = trainer_of("O2", "bf16")

    class Lean(Module):
        def training_step(self, batch, index):
            return loss_of(self.net, batch)

    module = Lean()
    trainer.fit(torch.compile(module, backend="eager"), data("O2"))
    assert same_weights(module.net.state_dict(), by_hand("O2", "bf16").weights)
    torch._dynamo.reset()


AVERAGED = [("O1", "fp16"), ("O2", "bf16"), ("O2", "fp16")]


def averaged_by_hand(level, low):
    """Averages what `state_dict` says after each step, in an fp32 model of torch's own that knows no session."""
    twin, average = network(), AveragedModel(network(), avg_fn=get_ema_avg_fn(0.5), use_buffers=True)

    def after(model):
        twin.load_state_dict(model.state_dict())
        average.update_parameters(twin)

    by_hand(level, low, after=after)
    return average.module


@pytest.mark.parametrize(("level", "low"), AVERAGED)
def test_an_exponential_average_is_of_the_fp32_weights_validates_as_such_and_becomes_them(level, low):
    seen = []

    class Checked(Module):
        def validation_step(self, batch, index):
            seen.append(loss_of(self.net, batch).item())

    module = Checked()
    often = {"val_check_interval": 20, "check_val_every_n_epoch": None, "num_sanity_val_steps": 1}
    trainer = trainer_of(level, low, callbacks=[EMAWeightAveraging(decay=0.5)], **often)
    trainer.fit(module, data(level), data("O0", 3))
    average = averaged_by_hand(level, low)
    assert same_weights(module.net.state_dict(), average.state_dict())
    with halfstep.initialize(average, None, level, low=low), torch.no_grad():
        assert [loss_of(average, batch).item() for batch in batches(3, None)] == seen[-3:]
    assert len(seen) == 1 + 5 * 3


def test_a_run_with_an_average_resumes_bit_identically(tmp_path):
    def fit(module, epochs, path=None, **settings):
        trainer = trainer_of("O2", "bf16", max_epochs=epochs, **settings)
        trainer.callbacks.insert(0, EMAWeightAveraging(decay=0.5))
        trainer.fit(module, data("O2", 50), ckpt_path=path)

    whole, first, second = Module(), Module(), Module()
    fit(whole, 2)
    saver = ModelCheckpoint(tmp_path, filename="at", save_top_k=-1)
    fit(first, 1, enable_checkpointing=True, callbacks=[saver])
    fit(second, 2, tmp_path / "at.ckpt")
    assert same_weights(second.state_dict(), whole.state_dict())


@pytest.mark.parametrize(("level", "low"), AVERAGED)
@pytest.mark.parametrize("norm", [False, True])
def test_stochastic_weight_averaging_averages_the_fp32_weights_of_epochs(level, low, norm):
    seen = []

    class Note(Callback):
        def on_train_epoch_start(self, trainer, module):
            seen.append({name: value.clone() for name, value in module.state_dict().items()})

        def on_train_batch_start(self, trainer, module, batch, index):
            if trainer.current_epoch == 4 and index == 0:  # where statistics of the average are taken
                seen.append({name: value.clone() for name, value in module.state_dict().items()})

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)) if norm else None
    module = Module(model)
    average = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    trainer = trainer_of(level, low, max_epochs=4, callbacks=[Note(), average], accumulate_grad_batches=1)
    trainer.fit(module, data("O0", 6))
    weights = seen[-1] if norm else module.state_dict()  # Lightning itself makes a stale step in that last epoch
    for name, _ in module.named_parameters():
        wanted, value = seen[1][name], weights[name]
        for count, epoch in enumerate(seen[2:4], 1):
            wanted = wanted + (epoch[name] - wanted) / torch.tensor(count + 1)
        assert torch.equal(value, wanted)
        assert value.dtype is torch.float32
    assert not torch.equal(value, value.bfloat16().float())
    assert "on_train_end" not in vars(average)


def test_averages_that_would_be_rounded_are_refused_before_the_first_step():
    for callback in (EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.01)):
        with pytest.raises(SetupError, match=rf"{type(callback).__name__} averages weights, but O3 .*Halfstep\('O2'\)"):
            fitted("O3", "bf16", callbacks=[callback])
        with pytest.raises(SetupError, match=r"fp32 averages of .* rounded to torch.bf.*call module.float\(\) before"):
            fitted("O2", "bf16", Module(network().bfloat16()), callbacks=[callback])
        assert not {"on_train_end", "on_train_epoch_start"} & vars(callback).keys()


def test_a_checkpoint_is_not_loaded_into_weights_that_came_low(tmp_path):
    def fit(level, epochs, module=None, path=None):
        module = Module(network().bfloat16()) if module is None else module
        trainer = trainer_of(level, "bf16", max_epochs=epochs)
        low = [(inputs.bfloat16(), targets.bfloat16()) for inputs, targets in batches(8, None)]
        trainer.fit(module, DataLoader(low, batch_size=None), ckpt_path=path)
        if path is None:
            trainer.save_checkpoint(tmp_path / f"{level} {epochs}.ckpt")
        return module.state_dict()

    whole, _ = fit("O2", 2), fit("O2", 1)
    with pytest.raises(
        SetupError, match=r"fp32 values from ckpt_path would be rounded to torch\.bf.*call module\.float\(\) before"
    ):
        fit("O2", 2, path=tmp_path / "O2 1.ckpt")
    assert same_weights(fit("O2", 2, Module(network().bfloat16()).float(), tmp_path / "O2 1.ckpt"), whole)
    whole, _ = fit("O0", 2), fit("O0", 1)  # which trains them as they came
    assert same_weights(fit("O0", 2, path=tmp_path / "O0 1.ckpt"), whole)


def test_an_optimizer_of_the_users_own_is_refused_where_it_would_round():
    class Own(Two):
        def training_step(self, batch, index):
            self.manual_backward(self.judge(batch[1]).mean())
            torch.optim.SGD(self.judge.parameters(), lr=1.0).step()

    module = Own()
    with pytest.raises(
        SessionError, match=r"SGD is not an optimizer of this session, but would step judge\.weight.*configure"
    ):
        trainer_of("O2", "bf16", gradient_clip_val=None, accumulate_grad_batches=1).fit(module, data("O0", 1))
    assert same_weights(module.state_dict(), Own().state_dict())


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return batches(40)[index]


def test_two_processes_with_the_same_data_train_as_one():
    module = Module()
    ways = {"strategy": "ddp_spawn", "devices": 2, "use_distributed_sampler": False, "accumulate_grad_batches": 1}
    trainer_of("O2", "bf16", **ways).fit(module, DataLoader(Data(), batch_size=None))
    torch.testing.assert_close(
        dict(module.net.state_dict()), by_hand("O2", "bf16", 40, accumulate=1).weights, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("level", "low"), [("O1", "fp16"), ("O2", "bf16")])
def test_a_step_that_lightning_does_not_log_reads_nothing_on_the_host(level, low):
    class Lean(Module):
        def training_step(self, batch, index):
            return loss_of(self.net, batch)

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, batch, index):
            self.mode = NoSync()
            self.mode.__enter__()

        def on_train_batch_end(self, *args):
            self.mode.__exit__(None, None, None)

    trainer, _ = fitted(level, low, Lean(), callbacks=[Watch()], logger=Kept(), log_every_n_steps=1000)
    assert trainer.global_step == 50


def test_precision_beside_the_plugin_and_two_plugins_are_refused_by_lightning():
    with pytest.raises(ValueError, match=r"Received both `precision=bf16-mixed` and `plugins=.*Halfstep\('O1'"):
        trainer_of("O1", "bf16", precision="bf16-mixed")
    with pytest.raises(lightning.pytorch.utilities.exceptions.MisconfigurationException, match="multiple values"):
        trainer_of("O1", "bf16", plugins=[Halfstep(), Halfstep()])
    with pytest.raises(ValueError, match="Received both"):
        lightning.Fabric(precision="16-mixed", plugins=[Halfstep()])


def test_a_strategy_that_is_not_supported_is_named():
    class Odd(lightning.pytorch.strategies.SingleDeviceStrategy):
        pass

    with pytest.raises(SetupError, match=r"strategy of the Trainer is Odd, .* only with Single.*; leave strategy out"):
        fitted("O1", "bf16", strategy=Odd(torch.device("cpu")))
    Odd.__name__ = "FSDPStrategy"
    with pytest.raises(
        SetupError, match=r"FSDPStrategy is FSDP1\), use a Trainer with ModelParallelStrategy, and fully"
    ):
        fitted("O1", "bf16", strategy=Odd(torch.device("cpu")))
    plugin, model = Halfstep(), torch.nn.Linear(2, 2)
    fabric = lightning.Fabric(strategy=lightning.fabric.strategies.DataParallelStrategy(), plugins=[plugin])
    with pytest.raises(SetupError, match=r"the Fabric is DataParallelStrategy, .* only with Single"):
        plugin.setup(fabric, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.gpu
def test_lightnings_fsdp_is_refused_where_it_runs():
    with pytest.raises(SetupError, match=r"is FSDPStrategy.* use a Trainer with ModelParallelStrategy"):
        fitted("O1", "bf16", strategy="fsdp", accelerator="gpu", devices=1)


def test_fabric_sets_up_all_models_once():
    plugin, (model, other) = Halfstep(), (nn.Linear(2, 2), nn.Linear(2, 2))
    fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
    plugin.setup(fabric, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(SetupError, match="was called before; pass all models in one call"):
        plugin.setup(fabric, other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(SetupError, match=r"this Linear was not passed to plugin\.setup; pass all models"):
        fabric.setup(other, torch.optim.SGD(other.parameters(), lr=0.1))
    plugin.close()


def test_a_checkpoint_that_is_saved_after_an_evaluation_holds_the_scale_of_the_fit(tmp_path):
    trainer, module = fitted("O1", "fp16")
    before = copy.deepcopy(trainer.precision_plugin.state_dict())
    assert before
    trainer.validate(module, data("O0", 2), verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    held = torch.load(tmp_path / "after.ckpt", weights_only=False)
    assert before in held.values()


def test_a_replaced_optimizer_is_found_before_it_steps():
    module = Module()
    before = copy.deepcopy(module.state_dict())

    class Replace(Callback):
        def on_train_start(self, trainer, module):
            trainer.optimizers = [torch.optim.SGD(module.parameters(), lr=1.0)]

    with pytest.raises(SetupError, match=r"this SGD is not an optimizer of .*return it from configure_optimizers"):
        fitted("O1", "bf16", module, callbacks=[Replace()])
    assert same_weights(module.state_dict(), before)


def test_sinks_of_the_user_get_the_steps_too():
    seen = []
    fitted("O1", "fp16", plugins=[Halfstep("O1", low="fp16", sinks=[seen.append])])
    assert [record.step for record in seen] == list(range(1, 51))


def test_settings_are_checked_when_the_plugin_is_made_and_versions_when_the_adapter_is_imported(monkeypatch):
    with pytest.raises(TypeError, match="no keyword 'lossscale'; did you mean 'loss_scale'"):
        Halfstep("O1", lossscale=4.0)
    monkeypatch.setattr(lightning, "__version__", "3.0.1")
    monkeypatch.delattr(lightning.pytorch.callbacks, "WeightAveraging")  # others have other names
    with pytest.raises(SetupError, match=r"lightning 3\.0\.1 is installed.*pip install 'lightning>="):
        runpy.run_path(adapter.__file__)


@pytest.mark.parametrize(("level", "low"), SETTINGS)
def test_fabric_trains_bit_for_bit_as_the_loop_by_hand_and_resumes(level, low, tmp_path):
    def opened():
        plugin = Halfstep(level, low=low)
        fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
        model = network()
        own = optimizer_of(model)
        schedule = schedule_of(own)
        wrapped, optimizer = plugin.setup(fabric, model, own)
        return plugin, fabric, model, wrapped, optimizer, schedule

    losses = []
    plugin, fabric, model, wrapped, optimizer, schedule = opened()
    for index, batch in enumerate(batches(100, bad_at(level))):
        if index == 60:
            state = {"model": wrapped, "optimizer": optimizer, "halfstep": plugin, "schedule": schedule}
            fabric.save(tmp_path / "at.ckpt", state)
            plugin, fabric, model, wrapped, optimizer, schedule = opened()
            state = {"model": wrapped, "optimizer": optimizer, "halfstep": plugin, "schedule": schedule}
            fabric.load(tmp_path / "at.ckpt", state)
        loss = loss_of(wrapped, batch)
        losses.append(loss.item())
        fabric.backward(loss / ACCUMULATE)
        if index % ACCUMULATE == ACCUMULATE - 1:
            fabric.clip_gradients(wrapped, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    plugin.close()
    other = by_hand(level, low)
    assert same_losses(losses, other.losses)
    assert same_weights(model.state_dict(), other.weights)


def test_a_fabric_loop_that_forgets_the_plugins_setup_is_told_which_line_to_change():
    fabric = lightning.Fabric(accelerator="cpu", plugins=[Halfstep("O2", low="bf16")])
    model = network()
    with pytest.raises(SessionError, match=r"plugin.setup\(fabric, model, optimizer\)"):
        fabric.setup(model, optimizer_of(model))


def test_fabric_sets_up_several_models_and_extends_the_plan_by_its_autocast():
    plugin = Halfstep("O1", low="bf16")
    fabric = lightning.Fabric(accelerator="cpu", plugins=[plugin])
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    first, second, a, b = plugin.setup(fabric, models, *(optimizer_of(model) for model in models))
    fabric.backward(second(first(torch.ones(2, 4))).mean())
    a.step()
    b.step()
    assert plugin.session.status().steps == 2
    assert first(torch.ones(2, 4)).dtype is torch.float32
    with fabric.autocast():
        assert (torch.ones(2, 4) @ models[0].weight).dtype is torch.bfloat16
    plugin.close()


@pytest.mark.parametrize(("level", "low"), [("O1", "bf16"), ("O2", "bf16"), ("O2", "fp16"), ("O3", "bf16")])
@pytest.mark.parametrize("ticket", [True, False])
def test_pruned_weights_are_zero_in_the_end(level, low, ticket):
    module = Module(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    prune = ModelPruning(
        "l1_unstructured", [(module.net[1], "weight")], amount=0.5, use_lottery_ticket_hypothesis=ticket
    )
    trainer_of(level, low, max_epochs=2, callbacks=[prune], accumulate_grad_batches=1).fit(module, data("O0", 6))
    weight = module.net[1].weight
    assert weight.dtype is torch.float32
    assert (weight == 0).float().mean() == 0.75
    assert "apply_pruning" not in vars(prune)
