"""prefect.yaml says what Prefect understands: it ignores unknown keys silently, so they are refused here."""

from __future__ import annotations

import importlib

import yaml
from prefect.cli.deploy._models import DeploymentConfig, PrefectYamlModel

from slipstream.config import RunConfig
from tasks.deployment import load
from tests.conftest import ROOT

DECLARED = yaml.safe_load((ROOT / "prefect.yaml").read_text())


def test_only_known_keys() -> None:
    assert set(DECLARED) <= set(PrefectYamlModel.model_fields) | {"prefect-version"}
    for deployment in DECLARED["deployments"]:
        assert set(deployment) <= set(DeploymentConfig.model_fields), deployment["name"]


def test_entrypoints_and_steps_import() -> None:
    for deployment in DECLARED["deployments"]:
        path, _, name = deployment["entrypoint"].partition(":")
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert hasattr(module, name)
        for step in deployment["build"]:
            dotted = next(iter(step))
            parent, _, function = dotted.rpartition(".")
            assert callable(getattr(importlib.import_module(parent), function))


def test_parameters_are_complete_configurations() -> None:
    for deployment in DECLARED["deployments"]:
        step = next(iter(deployment["build"][0].values()))
        assert deployment["parameters"] == {"config": "{{{{ {}.config }}}}".format(step["id"])}
        loaded = load(str(ROOT / step["path"]))
        assert RunConfig.model_validate(loaded["config"]).name


def test_one_weekly_schedule_and_it_is_paused() -> None:
    schedules = [s for deployment in DECLARED["deployments"] for s in deployment.get("schedules", [])]
    assert [(s["cron"], s["active"]) for s in schedules] == [("0 3 * * 1", False)]
