"""Settings of the policies in YAML and as options, of every strategy and callback that takes them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule

from lt_tiled import ActivationCheckpointing, SequenceParallel, Tiling
from lt_tiled.cli import main
from tests.lit import LitTiny

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "tiling": [
        {
            "num_shards": 4,
            "targets": ["MLP", "model.layers.*.mlp"],
            "accumulate": "param",
            "self_check": False,
            "compare": "warn",
            "compile": {"dynamic": True},
        },
        {"tile_tokens": 512},
    ],
    "activation_checkpointing": [
        {
            "targets": "Block",
            "offload": "cpu+disk",
            "directory": "/tmp",
            "cpu_budget": "1GiB",
            "disk_budget": "2GiB",
            "prefetch": 3,
            "keep_last": 2,
            "direct_io": False,
            "keep": ["aten.mm.default"],
            "compare": "warn",
        },
    ],
    "loss": [{}],
    "sequence_parallel": [{"size": 2, "targets": ["Block"], "self_check": False}],
}
"""For each argument the fields of its policy, at values that are not the defaults."""
POLICIES = {
    "tiling": Tiling,
    "activation_checkpointing": ActivationCheckpointing,
    "sequence_parallel": SequenceParallel,
}
TAKES = {
    "lt_tiled.TiledSingleDeviceStrategy": [*SETTINGS],
    "lt_tiled.TiledDDPStrategy": [*SETTINGS],
    "lt_tiled.TiledFSDPStrategy": [*SETTINGS],
    "lt_tiled.TiledModelParallelStrategy": [*SETTINGS],
    "lt_tiled.TiledDeepSpeedStrategy": [*SETTINGS],
    "lt_tiled.callbacks.Tiled": ["tiling", "activation_checkpointing", "loss"],
}
"""The arguments with policies of each class that a Trainer takes."""


def settings_of(class_path: str) -> list[dict[str, Any]]:
    """Return the sets of arguments that together set each field of each policy."""
    first = {name: SETTINGS[name][0] or 8 for name in TAKES[class_path]}
    others = [{name: other} for name in TAKES[class_path] for other in SETTINGS[name][1:]]
    return [first, *others]


def arguments(class_path: str, settings: dict[str, Any], form: str) -> list[str]:
    """Return arguments of a command that set the policies of a strategy or callback."""
    key = "callbacks" if ".callbacks." in class_path else "strategy"
    common = ["--trainer.accelerator=cpu", "--trainer.logger=false"]
    if form == "yaml":
        value: Any = {"class_path": class_path, "init_args": settings}
        trainer = {key: [value] if key == "callbacks" else value}
        Path("run.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
        return ["--config=run.yaml", *common]
    options = []
    for name, policy in settings.items():
        if not isinstance(policy, dict):
            options.append(f"--trainer.{key}.{name}={policy}")
            continue
        for field, value in policy.items():
            given = value if isinstance(value, str) else json.dumps(value)
            options.append(f"--trainer.{key}.{name}.{field}={given}")
    return [f"--trainer.{key}={class_path}", *options, *common]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["yaml", "options"])
@pytest.mark.parametrize("class_path", TAKES)
def test_lightning_cli(class_path: str, form: str) -> None:
    """In a plain ``LightningCLI``, each field of each policy reaches the strategy or callback."""
    for settings in settings_of(class_path):
        cli = LightningCLI(
            LitTiny, BoringDataModule, run=False, args=arguments(class_path, settings, form), save_config_callback=None
        )
        trainer = cli.trainer
        is_callback = ".callbacks." in class_path
        made: Any = trainer.strategy
        if is_callback:
            made = next(callback for callback in trainer.callbacks if type(callback).__module__.startswith("lt_tiled"))
        for name, value in settings.items():
            expected = replace(POLICIES[name](), **value) if name in POLICIES else value
            assert getattr(made, name) == expected


@pytest.mark.slow
@pytest.mark.parametrize("form", ["yaml", "options"])
@pytest.mark.parametrize("class_path", TAKES)
def test_lt_tiled(class_path: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In ``lt-tiled fit``, each field of each policy is understood, and saved as it was given."""
    for settings in settings_of(class_path):
        given = arguments(class_path, settings, form)
        with pytest.raises(SystemExit) as stop:
            main(["fit", "--model=tests.lit.LitTiny", *given, "--print_config"])
        assert stop.value.code == 0
        printed = capsys.readouterr().out
        trainer = yaml.safe_load(printed[printed.index("# lightning.pytorch==") :])["trainer"]
        saved = trainer["callbacks"][0] if ".callbacks." in class_path else trainer["strategy"]
        for name, value in settings.items():
            found = saved["init_args"][name]
            assert (found if not isinstance(value, dict) else {key: found[key] for key in value}) == value


def test_every_field_is_set() -> None:
    """The tables above name every field of the policies, each at another value than its default."""
    for name, policy in POLICIES.items():
        default = policy()
        given = {key: value for settings in SETTINGS[name] for key, value in settings.items()}
        assert given.keys() == {field.name for field in fields(policy)}
        assert all(getattr(default, key) != value for key, value in given.items())


def test_every_class_is_named() -> None:
    """The table names every strategy of the Trainer and every callback that takes a policy."""
    import lt_tiled
    from lt_tiled import callbacks

    named = {class_path.rpartition(".")[2] for class_path in TAKES}
    strategies = {name for name in lt_tiled.__all__ if name.endswith("Strategy")}
    prepares = {name for name in callbacks.__all__ if hasattr(getattr(callbacks, name), "set_policies")}
    assert named == strategies | prepares
