"""What `sanity` asks beyond a training run: which problems are kept, and from how many."""

from pydantic import Field, model_validator

from mismatch_probe.config.model import NumPrompts, NumSamples, Settings

DEFAULT_CANDIDATES = 256


class SanitySettings(Settings):
    """The first `candidates` problems of the task are tried with `solve_samples` responses each; those solved at least
    `keep_low` and at most `keep_high` of the time are kept, up to task.num_problems of them.
    """

    candidates: NumPrompts = DEFAULT_CANDIDATES
    solve_samples: NumSamples = 40
    keep_low: float = Field(default=0.2, ge=0, le=1)
    keep_high: float = Field(default=0.8, ge=0, le=1)

    @model_validator(mode="after")
    def _keeps_something(self) -> "SanitySettings":
        if self.keep_low > self.keep_high:
            raise ValueError(f"--keep-low {self.keep_low:g} lies above --keep-high {self.keep_high:g}")
        return self
