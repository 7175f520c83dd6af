"""A composite action run as its runner does: its steps in order, with expressions, conditions, outputs and inputs.

Of the expressions those are known that the action has. Another action that a step uses is noted, not run.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from tests.examples.test_github_steps import Job

_EXPRESSION: Final = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
_TERM: Final = re.compile(r"[a-z][\w-]*(?:\.[\w-]+)+(?:\(\))?|cancelled\(\)")
_RUNS_AFTER_A_FAILURE: Final = ("cancelled()", "always()", "failure()")


@dataclass
class WholeJob:
    """inputs: those that the workflow gives; the others have their defaults. event: what is known under `github.`.

    ran: the names of the steps that ran. kept: what each other action was given, by its name.
    """

    job: Job
    action: Path
    inputs: dict[str, str]
    event: dict[str, str]
    ran: list[str] = field(default_factory=list)
    kept: dict[str, dict[str, str]] = field(default_factory=dict)
    code: int = 0

    def __post_init__(self) -> None:
        content = yaml.safe_load(self.action.read_text())
        unknown = self.inputs.keys() - content["inputs"].keys()
        assert not unknown, f"the action has no input {unknown}"
        missing = {name for name, given in content["inputs"].items() if given.get("required")} - self.inputs.keys()
        assert not missing, f"the action needs {missing}"
        self._known = {f"github.{name}": value for name, value in self.event.items()}
        for name, described in content["inputs"].items():
            self._known[f"inputs.{name}"] = self.inputs.get(name, self._filled(described.get("default", "")))
        for step in content["runs"]["steps"]:
            self._take(step)
        self.outputs = {name: self._filled(output["value"]) for name, output in content["outputs"].items()}

    def _take(self, step: dict[str, Any]) -> None:
        condition = _EXPRESSION.sub(r"\1", step.get("if", ""))
        if self.code and not any(word in condition for word in _RUNS_AFTER_A_FAILURE):
            return
        if condition and not self._holds(condition):
            return
        self.ran.append(step["name"])
        if "uses" in step:
            self.kept[step["uses"].partition("@")[0]] = {
                name: self._filled(value) for name, value in step["with"].items()
            }
            return
        variables = {name: self._filled(value) for name, value in step["env"].items()}
        before = self.job.outputs()
        ended = self.job.run(step["run"], variables)
        self.code = self.code or ended.returncode
        for name, value in self.job.outputs()[len(before) :]:
            self._known[f"steps.{step.get('id')}.outputs.{name}"] = value

    def _filled(self, text: Any) -> str:
        return _EXPRESSION.sub(lambda found: self._value(found[1]), str(text))

    def _value(self, name: str) -> str:
        """What is not there is empty, as on a runner; so `steps` are that did not run."""
        assert name in self._known or name.startswith(("steps.", "github.event.")), f"{name} is not known"
        return self._known.get(name, "")

    def _holds(self, condition: str) -> bool:
        python = re.sub(r"!(?!=)", " not ", condition.replace("&&", " and ").replace("||", " or "))
        terms = _TERM.sub(lambda term: "False" if term[0] == "cancelled()" else repr(self._value(term[0])), python)
        return bool(eval(terms, {"__builtins__": {}}))
