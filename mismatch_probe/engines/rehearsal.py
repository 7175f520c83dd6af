"""What an engine would refuse, found out before it is started: no weight is loaded and no device is taken."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, TypeVar

from mismatch_probe.children.messages import as_exception
from mismatch_probe.children.start import Job, started
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.config.sides import InferSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import engine_part
from mismatch_probe.errors import MismatchProbeError, UsageError

Holder = TypeVar("Holder", EngineSettings, InferSide)

_UNLIMITED = -1
"""vLLM's word for as long a context as fits."""


def with_typed_arguments(holder: Holder, engine: str) -> Holder:
    """The settings as a run records them: each engine argument under the engine's own name and in its own type.

    A flag gives text where a file gives a number; both are the same run.

    Raises:
        MissingExtra: the engine's library is not installed.
        UsageError: the engine has no such argument, or none that takes such a value.
    """
    if not holder.args:
        return holder
    arguments = engine_part(engine, "arguments")
    return holder.model_copy(update={"args": arguments.engine_arguments(holder.args, arguments.known_arguments())})


def without_defaults(holder: Holder, engine: str, over: Mapping[str, Any] | None = None) -> Holder:
    """The settings without the engine arguments that are the engine's defaults and are not among those `over` them.

    Raises:
        MissingExtra: the engine's library is not installed.
    """
    defaults = engine_part(engine, "arguments").default_arguments() if holder.args else {}

    def says_nothing(name: str, value: Any) -> bool:
        same = name in defaults and (type(value), value) == (type(defaults[name]), defaults[name])
        return same and name not in (over or {})

    kept = {name: value for name, value in holder.args.items() if not says_nothing(name, value)}
    return holder.model_copy(update={"args": kept})


def check_engine(dtype: Dtype, sampling: SamplingSettings, engine: EngineSettings) -> None:
    """Refuse at once what needs no checkpoint to be seen.

    Raises:
        UsageError: the engine has no such dtype, cannot sample so, or cannot do what its settings ask for.
    """
    engine_part(engine.name, "limits").check_limits(dtype, sampling, engine)


def reach(engine: EngineSettings) -> int | None:
    """Ask an engine that runs elsewhere whether it is there; the longest sequence that it holds, in tokens, where it
    says so.

    Raises:
        UsageError: what answers is no server that can be asked, wants a key, or serves another model.
        EngineError: nothing answers.
    """
    longest: int | None = engine_part(engine.name, "rehearse").reach(engine)
    return longest


def check_room(engine: EngineSettings, label: str, num_prompt_tokens: int) -> None:
    """
    Raises:
        UsageError: the engine leaves the prompt no room for a response and the token that a replay adds.
    """
    if engine.is_remote:
        longest = reach(engine)
        if longest is not None and longest < num_prompt_tokens + 2:
            raise UsageError(
                f"the server at {engine.args['url']} holds {longest} tokens, which leaves {label} of "
                f"{num_prompt_tokens} tokens no room for a response; shorten it, or raise the server's limit"
            )
        return
    given = with_typed_arguments(engine, engine.name).args.get("max_model_len")
    if given is not None and given != _UNLIMITED and given < num_prompt_tokens + 2:
        raise UsageError(
            f"--vllm.max_model_len {given} leaves {label} of {num_prompt_tokens} tokens no room for a "
            f"response; give at least {num_prompt_tokens + 2}"
        )


def _ranks_to_be(starts: "Sequence[Start]") -> dict[str, str]:
    """What says that there are as many ranks as the engines' over ranks need: a rehearsal starts none."""
    ranks = prod(engine.num_ranks or 1 for _, _, engine in starts)
    return {"WORLD_SIZE": str(ranks)} if ranks > 1 else {}


Start = tuple[str, Dtype, EngineSettings]
"""A checkpoint's folder, and what it is started in and with."""


@contextmanager
def rehearsal(
    starts: Sequence[Start], sampling: SamplingSettings, *, max_model_len: int, trust_remote_code: bool = False
) -> Iterator[dict[int, MismatchProbeError]]:
    """While the body runs, a process of its own configures the engine for each start, short of loading the model.

    Importing an engine's library takes seconds and changes the process that does it. Arguments as in `start_engine`.
    After the body the mapping has what each start that is refused would have raised, by its number.

    Raises:
        MismatchProbeError: the process failed itself, after the body.
    """
    name = starts[0][2].name
    request = {
        "starts": [(folder, dtype, engine.model_dump(mode="json")) for folder, dtype, engine in starts],
        "sampling": sampling.model_dump(mode="json"),
        "max_model_len": max_model_len,
        "trust_remote_code": trust_remote_code,
    }
    job = Job(
        name=f"configuring {name}",
        function=f"{__package__}.{name}.rehearse:rehearse_requested",
        arguments=(request,),
        preload="engine",
        when_killed="free some and try again",
        environment=_ranks_to_be(starts),
    )
    refusals: dict[int, MismatchProbeError] = {}
    with started(job) as result:
        yield refusals
        failures = enumerate(result())
        refusals.update({number: as_exception(failure) for number, failure in failures if failure is not None})
