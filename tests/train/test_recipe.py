"""Recipes: names, files, overrides and what is refused."""

import dataclasses
import inspect
import os
import re
from pathlib import Path

import pytest

from unskip.models import create_model
from unskip.train import Recipe, load_recipe, recipe_names
from unskip.train.recipe import FIELDS, SECTIONS, parse_command, parse_overrides, recipe_text


@pytest.mark.parametrize("name", recipe_names())
def test_named_recipe_loads_and_says_what_it_is(name: str) -> None:
    load_recipe(name)
    head = "\n".join(line for line in recipe_text(name).splitlines() if line.startswith("#"))
    for word in ("command:", "hardware:", "time:", "expected:"):
        assert word in head
    assert f"unskip train {name}" in head


@pytest.mark.parametrize("name", recipe_names())
def test_named_recipe_has_a_network(name: str) -> None:
    import torch

    recipe = load_recipe(name)
    with torch.device("meta"):
        assert sum(p.numel() for p in create_model(recipe.network.model, **recipe.network.options).parameters()) > 0


def test_cifar_recipe_is_the_papers() -> None:
    """Zhang et al. 2024, section 5.2."""
    r = load_recipe("cifar10-pnnh-110")
    assert (
        r.run.epochs,
        r.optimizer.lr,
        r.run.batch,
        r.optimizer.weight_decay,
        r.optimizer.schedule,
        r.optimizer.momentum,
    ) == (300, 0.1, 128, 3e-4, "cosine", 0.9)
    assert (r.optimizer.optimizer, r.data.crop, r.data.pad, r.data.flip) == ("sgd", "pad", 4, 0.5)


def test_imagenet_recipe_is_the_papers() -> None:
    """Zhang et al. 2024, section 5.3."""
    r = load_recipe("imagenet-pnnh-34")
    assert (r.optimizer.lr, r.run.batch, r.optimizer.weight_decay, r.optimizer.schedule, r.run.epochs, r.data.crop) == (
        0.256,
        256,
        1e-5,
        "cosine",
        120,
        "resized",
    )
    assert r.optimizer.warmup_epochs > 0


def test_seqnet_101_has_a_rate_for_its_third_stage() -> None:
    """Hu, B.1: 0.1 for the classifier, 0.02 elsewhere, 0.02 * 6 / 23 in stage 3."""
    r = load_recipe("imagenet-seqnet-101")
    assert r.optimizer.lr * r.optimizer.lr_scales["fc"] == pytest.approx(0.1)
    assert r.optimizer.lr * r.optimizer.lr_scales["*"] == pytest.approx(0.02)
    assert r.optimizer.lr * r.optimizer.lr_scales["layer3"] == pytest.approx(0.02 * 6 / 23)
    assert list(r.optimizer.lr_scales)[-1] == "*"  # the first match decides


@pytest.mark.parametrize("section", SECTIONS.values())
def test_every_field_has_a_comment_and_is_frozen_and_keyword_only(section: type) -> None:
    source = inspect.getsource(section)
    for field in dataclasses.fields(section):
        line = next(line for line in source.splitlines() if line.strip().startswith(f"{field.name}:"))
        assert "  # " in line, field.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(section(), dataclasses.fields(section)[0].name, 1)
    with pytest.raises(TypeError):
        section("resnet56")


def test_names_of_fields_are_unique_so_that_flags_are_flat() -> None:
    names = [field.name for section in SECTIONS.values() for field in dataclasses.fields(section)]
    assert sorted(names) == sorted(FIELDS)


def test_toml_round_trip(tmp_path: Path) -> None:
    recipe = Recipe.of(milestones=(3, 5), lr_scales={"layer3.*": 0.25}, options={"ratio": 0.25}, lr=1e-3, nesterov=True)
    file = tmp_path / "mine.toml"
    file.write_text(recipe.to_toml())
    assert load_recipe(file) == recipe
    assert load_recipe(file, lr=0.5) == recipe.replace(lr=0.5)


def test_what_toml_has_no_word_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"options\['hidden'\]=None can't be written down.*leave it out"):
        Recipe.of(method="pnnh", options={"hidden": None})


def test_overrides_from_a_command_line() -> None:
    changes = parse_overrides(
        ["--lr", ".05", "--weight-decay=1e-4", "--nesterov", "--cuda-graph", "true", "--milestones", "[120, 160]",
         "--lr-scales", '{"layer3.*" = 0.26, fc = 1}', "--model", "resnet20", "--epochs", "3"]
    )  # fmt: skip
    recipe = Recipe().replace(**changes)
    expected = {"lr": 0.05, "weight_decay": 1e-4, "nesterov": True, "cuda_graph": True, "milestones": [120, 160]}
    expected |= {"lr_scales": {"layer3.*": 0.26, "fc": 1.0}, "model": "resnet20", "epochs": 3}
    assert recipe.flat() == Recipe().flat() | expected
    assert (recipe.network.model, recipe.optimizer.milestones, recipe.run.epochs) == ("resnet20", (120, 160), 3)
    assert parse_command([]) == ("digits-pnnh-56", load_recipe("digits-pnnh-56"))
    assert parse_command(["--seed", "3"])[1].run.seed == 3
    assert parse_command(["cifar10-pnnh-110", "--seed", "3"]) == (
        "cifar10-pnnh-110",
        load_recipe("cifar10-pnnh-110", seed=3),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epoch", "3"], "no option --epoch. Did you mean 'epochs'"),
        (["--learning-rate", "3"], "no option --learning-rate"),
        (["--epochs", "3.5"], "epochs=3.5 must be a whole number"),
        (["--epochs", "three"], "epochs='three' must be a whole number"),
        (["--epochs", "true"], "epochs=True must be a whole number"),
        (["--epochs"], "--epochs needs a value"),
        (["--epochs", "3", "--epochs", "4"], "--epochs was given twice"),
        (["--nesterov", "1"], "nesterov=1 must be true or false"),
        (["--lr", "nan"], "lr=nan must be a number"),
        (["--lr", "0"], "lr=0.0 must be above 0"),
        (["--lr", "1e300"], "lr=1e+300 must be at most 3.4e+38 in size"),
        (["--lr", "inf"], "lr=inf must be at most 3.4e+38 in size"),
        (["--lr", "-1"], "lr=-1.0 must be above 0"),
        (["--weight-decay", "9" * 400], "must be at most 3.4e+38 in size"),
        (["--lr-scales", "{fc = 1e300}"], "lr_scales['fc']=1e+300 must be at most 3.4e+38 in size"),
        (["--gamma", "1e30", "--milestones", "[1, 2]"], "gamma=1e+30 at 2 milestones make a learning rate above 1e38"),
        (["--epochs", "1" + "0" * 18], "epochs=1000000000000000000 must be 1 to 1,000,000"),
        (["--epochs", "1" + "0" * 30], "must be at most 9.22e+18 in size"),
        (["--epochs", "9" * 5000], "must be a whole number"),
        (["--epochs", "-3"], "epochs=-3 must be 1 to 1,000,000"),
        (["--image-size", "1000000"], "image_size=1000000 must be 0 to 8192 px"),
        (["--pad", "1000000"], "pad=1000000 must be 0 to 8192 px"),
        (["--repeats", "1" + "0" * 12], "repeats=1000000000000 must be 1 to 1000"),
        (["--workers", "1" + "0" * 12], "workers=1000000000000 must be 0 to 1024"),
        (["--mixup", "1e30"], "mixup=1e+30 must be 0 to 1000"),
        (["--color-jitter", "1e30"], "color_jitter=1e+30 must be 0 to 1000"),
        (["--lr", "[" * 5000], "must be a number"),
        (["--batch", "0"], "batch=0 must be above 0"),
        (["--flip", "1.5"], "flip=1.5 must be a probability"),
        (["--schedule", "cosin"], "schedule='cosin' is not known. Did you mean 'cosine'"),
        (["--milestones", "120"], "milestones=120 must be a list"),
        (["--milestones", "[1.5]"], "milestones=1.5 must be a whole number"),
        (["--milestones", "[7, 3]"], "milestones=[7, 3] must be epochs from 1 on, the earliest first"),
        (["--milestones", "[0]"], "milestones=[0] must be epochs from 1 on"),
        (["--lr-scales", "0.5"], "lr_scales=0.5 must be a table"),
        (["--lr-scales", "{fc = true}"], "must be a number"),
        (["--lr-scales", "{fc = -1}"], "lr_scales['fc']=-1.0 must be at least 0"),
        (["--keep", "best", "--val-fraction", "0"], "set val_fraction above 0"),
        (["--warmup-epochs", "99"], "must be at most epochs"),
        (["--mixup", "0.2", "--batch", "33"], "must be even"),
        (["digits-pnnh-55"], "no recipe named 'digits-pnnh-55'. Did you mean 'digits-pnnh-56'"),
        (["missing.toml"], "can't be read"),
        (["digits-pnnh-56", "extra"], "'extra' was not expected"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_command(words)


def test_the_command_of_the_doctor_names_the_network_that_is_trained() -> None:
    assert Recipe.of(model="resnet110").doctor == "unskip doctor resnet110"
    assert Recipe.of(model="resnet110", method="plain").doctor == "unskip doctor resnet110 --method plain"


def test_unknown_field_from_python() -> None:
    with pytest.raises(ValueError, match="no field 'learning_rate'"):
        Recipe().replace(learning_rate=0.1)
    with pytest.raises(ValueError, match="Did you mean 'weight_decay'"):
        load_recipe("digits-pnnh-56", weight_decy=0.1)


def test_a_section_holds_its_own_class() -> None:
    with pytest.raises(ValueError, match=r"network='resnet20' must be a NetworkConfig; Recipe\.of"):
        Recipe(network="resnet20")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('network = "resnet20"\nepochs = 3', "'network' is 'model' in [network]"),
        (
            "lr = 0.1",
            "'lr' stands outside the tables. Recipes have the tables [network], [data], [optimizer] and [run]",
        ),
        ("settle = 8192", "'settle' is 'recalibrate_batchnorm' in [run]"),
        ('optimizer = "adamw"', "'optimizer' stands outside the tables"),
        ("data = 3", "data=3 must be a table"),
        ("[machine]\nseed = 3", "there is no table [machine]"),
        ("[data]\nlr = 0.1", "there is no field 'lr' in [data]"),
        ("[run]\nepoch = 3", "there is no field 'epoch' in [run]. Did you mean 'epochs'"),
    ],
)
def test_a_recipe_without_its_tables_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "old.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        load_recipe(file)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(("old", "new"), [("network", "model"), ("settle", "recalibrate_batchnorm")])
def test_an_old_name_is_told_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ValueError, match=f"no field '{old}'. It is '{new}' now"):
        Recipe().replace(**{old: 1})
    with pytest.raises(ValueError, match=f"no option --{old}. It is '{new}' now"):
        parse_overrides([f"--{old}", "1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("lr = = 3", "is not valid TOML"), ("lr = " + "[" * 5000, "nested too deep"), (f"lr = {'9' * 5000}", "not valid")],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"broken\.toml .*{message}"):
        load_recipe(file)


def test_what_is_no_file_is_no_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    for name in ("pipe.toml", "folder.toml"):
        with pytest.raises(ValueError, match=rf"{name} can't be read: it is no file"):
            load_recipe(tmp_path / name)
