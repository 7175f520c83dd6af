"""An engine by its name: what it refuses before it is started, and its start."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any, Final, TypeVar, cast

from mismatch_probe.children.messages import Send, as_exception, describe_error
from mismatch_probe.children.start import Job, result_of
from mismatch_probe.config.model import EngineSettings, SamplingSettings
from mismatch_probe.config.sides import InferSide
from mismatch_probe.dtypes import Dtype
from mismatch_probe.engines.base import Engine, EngineProvider, EngineStart, Products
from mismatch_probe.engines.server import SERVER
from mismatch_probe.engines.vllm import VLLM
from mismatch_probe.errors import MismatchProbeError, UsageError
from mismatch_probe.plugins import Registry, require_members


def _require_provider(name: str, value: object) -> EngineProvider:
    members = (
        "packages",
        "preload",
        "start",
        "read_arguments",
        "default_arguments",
        "check_limits",
        "rehearse",
        "reach",
    )
    require_members(value, "EngineProvider", *members)
    return cast(EngineProvider, value)


ENGINES: Final[Registry[EngineProvider]] = Registry(
    "engine", "mismatch_probe.engines", {"vllm": VLLM, "server": SERVER}, _require_provider
)
"""Every engine by the name that `engine.name` gives."""


def engine_provider(name: str) -> EngineProvider:
    """
    Raises:
        UsageError: no engine has this name.
        PluginError: the plug-in that has it cannot be used.
    """
    return ENGINES.require(name, f"engine.name = {name!r}")


def start_engine(
    checkpoint: str,
    dtype: Dtype,
    engine: EngineSettings,
    sampling: SamplingSettings,
    *,
    max_model_len: int,
    num_sequences: int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
    products: Products = nullcontext,
    num_images: int = 0,
) -> Engine:
    """Start the engine that `engine.name` names; arguments as in `EngineStart`, errors as of `EngineProvider.start`."""
    how = EngineStart(
        checkpoint,
        dtype,
        engine,
        sampling,
        max_model_len,
        num_sequences,
        revision,
        trust_remote_code,
        seed,
        products,
        num_images,
    )
    return engine_provider(engine.name).start(how)


def require_images(engine: EngineSettings, label: str) -> None:
    """
    Raises:
        UsageError: the engine takes no prompts with images, of which `label` names one.
    """
    if not getattr(engine_provider(engine.name), "takes_images", False):
        raise UsageError(
            f"{label} holds an image, and the engine {engine.name} takes none from this tool; give prompts of text, or "
            "let vLLM run here"
        )


Holder = TypeVar("Holder", EngineSettings, InferSide)

_UNLIMITED = -1
"""vLLM's word for as long a context as fits."""


def with_typed_arguments(holder: Holder, engine: str) -> Holder:
    """The settings as a run records them: each engine argument under the engine's own name and in its own type.

    A flag gives text where a file gives a number; both are the same run.
    """
    provider = engine_provider(engine)
    return holder.model_copy(update={"args": provider.read_arguments(holder.args)}) if holder.args else holder


def without_defaults(holder: Holder, engine: str, run_arguments: Mapping[str, Any] | None = None) -> Holder:
    """The settings without the engine arguments that are the engine's defaults and are not among those `over` them."""
    defaults = engine_provider(engine).default_arguments() if holder.args else {}

    def says_nothing(name: str, value: Any) -> bool:
        same = name in defaults and (type(value), value) == (type(defaults[name]), defaults[name])
        return same and name not in (run_arguments or {})

    args = {name: value for name, value in holder.args.items() if not says_nothing(name, value)}
    return holder.model_copy(update={"args": args})


def check_engine(dtype: Dtype, sampling: SamplingSettings, engine: EngineSettings) -> None:
    """Refuse at once what needs no checkpoint to be seen.

    Raises:
        UsageError: the engine has no such dtype, cannot sample so, or cannot do what its settings ask for.
    """
    engine_provider(engine.name).check_limits(dtype, sampling, engine)


def reach(engine: EngineSettings) -> int | None:
    """As `EngineProvider.reach`, of the engine that `engine.name` names."""
    return engine_provider(engine.name).reach(engine)


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
    limit = with_typed_arguments(engine, engine.name).args.get("max_model_len")
    if limit is not None and limit != _UNLIMITED and limit < num_prompt_tokens + 2:
        raise UsageError(
            f"--vllm.max_model_len {limit} leaves {label} of {num_prompt_tokens} tokens no room for a "
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
    starts: Sequence[Start],
    sampling: SamplingSettings,
    *,
    max_model_len: int,
    trust_remote_code: bool = False,
    num_images: int = 0,
) -> Iterator[dict[int, MismatchProbeError]]:
    """While the body runs, a process of its own configures the engine for each start, short of loading the model.

    Importing an engine's library takes seconds and changes the process that does it. Arguments as in `start_engine`.
    After the body the mapping has what each start that is refused would have raised, by its number.
    """
    name = starts[0][2].name
    request = {
        "starts": [(folder, dtype, engine.model_dump(mode="json")) for folder, dtype, engine in starts],
        "sampling": sampling.model_dump(mode="json"),
        "max_model_len": max_model_len,
        "trust_remote_code": trust_remote_code,
        "num_images": num_images,
    }
    job = Job(
        name=f"configuring {name}",
        function=rehearse_requested,
        arguments=(request,),
        preload=engine_provider(name).preload,
        when_killed="free some and try again",
        environment=_ranks_to_be(starts),
    )
    refusals: dict[int, MismatchProbeError] = {}
    with result_of(job) as result:
        yield refusals
        failures = enumerate(result())
        refusals.update({number: as_exception(failure) for number, failure in failures if failure is not None})


def rehearse_requested(send: Send, request: dict[str, Any]) -> list[dict[str, str] | None]:
    """Rehearse every start of a request that came as JSON values; what each would raise, described."""
    starts, sampling = request.pop("starts"), SamplingSettings(**request.pop("sampling"))
    failures: list[dict[str, str] | None] = []
    for checkpoint, dtype, values in starts:
        engine = EngineSettings(**values)
        how = EngineStart(checkpoint, Dtype.parse(dtype), engine, sampling, **request)
        try:
            engine_provider(engine.name).rehearse(how)
            failures.append(None)
        except MismatchProbeError as error:
            failures.append(describe_error(error, f"configuring {engine.name}"))
    return failures
