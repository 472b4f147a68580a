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

import lt_tiled
from lt_tiled import ActivationCheckpointing, SequenceParallel, Tiling, callbacks
from lt_tiled.cli import main
from tests.lit import LitTiny

TILING = {"num_shards": 4, "targets": ["MLP", "model.layers.*.mlp"], "accumulate": "param", "self_check": False}
TILING |= {"compare": "warn", "compile": {"dynamic": True}}
CHECKPOINTING = {"targets": "Block", "offload": "cpu+disk", "directory": "/tmp", "cpu_budget": "1GiB"}
CHECKPOINTING |= {"disk_budget": "2GiB", "prefetch": 3, "keep_last": 2, "direct_io": False, "compare": "warn"}
CHECKPOINTING |= {"keep": ["aten.mm.default"]}
SETTINGS: list[dict[str, Any]] = [
    {
        "tiling": TILING,
        "activation_checkpointing": CHECKPOINTING,
        "loss": 8,
        "sequence_parallel": {"size": 2, "targets": ["Block"], "self_check": False},
    },
    {"tiling": {"tile_tokens": 512}},
]
"""Sets of arguments that together set each field of each policy to another value than its default."""
POLICIES = {
    "tiling": Tiling,
    "activation_checkpointing": ActivationCheckpointing,
    "sequence_parallel": SequenceParallel,
}
STRATEGIES = [f"lt_tiled.{name}" for name in lt_tiled.__all__ if name.endswith("Strategy")]
TAKES = {
    **{class_path: [*SETTINGS[0]] for class_path in STRATEGIES},
    "lt_tiled.callbacks.Tiled": ["tiling", "activation_checkpointing", "loss"],
}
"""The arguments with policies of each class that a Trainer takes."""


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
        given = {f"{name}.{field}": value for field, value in policy.items()} if name in POLICIES else {name: policy}
        for field, value in given.items():
            options.append(f"--trainer.{key}.{field}={value if isinstance(value, str) else json.dumps(value)}")
    return [f"--trainer.{key}={class_path}", *options, *common]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["yaml", "options"])
@pytest.mark.parametrize("class_path", TAKES)
def test_settings_of_every_policy(class_path: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each field of each policy reaches each strategy and callback in a plain ``LightningCLI``. ``lt-tiled fit``
    understands it, and saves it as it was given.
    """
    for chosen in SETTINGS:
        settings = {name: value for name, value in chosen.items() if name in TAKES[class_path]}
        given = arguments(class_path, settings, form)
        trainer = LightningCLI(LitTiny, BoringDataModule, run=False, args=given, save_config_callback=None).trainer
        ours = [made for made in trainer.callbacks if type(made).__module__.startswith("lt_tiled")]
        made: Any = ours[0] if ".callbacks." in class_path else trainer.strategy
        for name, value in settings.items():
            assert getattr(made, name) == (replace(POLICIES[name](), **value) if name in POLICIES else value)
        with pytest.raises(SystemExit) as stop:
            main(["fit", "--model=tests.lit.LitTiny", *given, "--print_config"])
        assert stop.value.code == 0
        printed = capsys.readouterr().out
        saved = yaml.safe_load(printed[printed.index("# lightning.pytorch==") :])["trainer"]
        saved = saved["callbacks"][0] if ".callbacks." in class_path else saved["strategy"]
        for name, value in settings.items():
            found = saved["init_args"][name]
            assert (found if name not in POLICIES else {key: found[key] for key in value}) == value


def test_every_field_and_class_is_named() -> None:
    """The tables above name every field of the policies, each at another value than its default, and every callback
    that takes a policy.
    """
    for name, policy in POLICIES.items():
        given = {key: value for settings in SETTINGS for key, value in settings.get(name, {}).items()}
        assert given.keys() == {field.name for field in fields(policy)}
        assert all(getattr(policy(), key) != value for key, value in given.items())
    takes = {
        f"lt_tiled.callbacks.{name}" for name in callbacks.__all__ if hasattr(getattr(callbacks, name), "set_policies")
    }
    assert TAKES.keys() == takes | {*STRATEGIES}
