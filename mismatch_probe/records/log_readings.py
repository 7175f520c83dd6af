"""What an import reads of a log besides numbers: its turns, and the choices of the engine that it records."""

from pydantic import BaseModel, ConfigDict

from mismatch_probe.notation import write_count


class Entry(BaseModel):
    """A part of a document that is still being written; no unknown keys."""

    model_config = ConfigDict(extra="forbid")


class TurnBreak(Entry):
    """The first turn of a trajectory whose prompt does not begin with the prompt and the completion of the turn before.

    num_old tokens from `position` on became num_new others; the ids and texts are their first few.
    """

    where: str
    turn: int
    """Counted from 0."""
    kind: str
    """`retokenized` (tokens merged or split), `dropped` (a block left out of what was sampled), `template` (a header,
    the end of a turn, what a template inserts), `observation` (what a tool wrote), `rewritten`, `placeholders` (another
    number of an image's).
    """
    position: int
    num_old: int
    num_new: int
    old_ids: list[int] = []
    new_ids: list[int] = []
    old_text: str = ""
    new_text: str = ""

    @property
    def words(self) -> str:
        """Where it is, and what became of which tokens."""
        place = f"{self.where}, token {write_count(self.position)}"
        if self.kind == "placeholders":
            return (
                f"{place}: {self.old_ids[0]} stands {write_count(self.num_old)} times in a row in the turn before, and "
                f"{write_count(self.num_new)} times here"
            )
        old, new = (
            repr(text) if text else f"[{', '.join(map(str, ids))}{', ...' if count > len(ids) else ''}]"
            for text, ids, count in (
                (self.old_text, self.old_ids, self.num_old),
                (self.new_text, self.new_ids, self.num_new),
            )
        )
        change = f"{old} became {new}" if self.num_old and self.num_new else f"{old} is left out"
        return f"{place}: {change if self.num_old else f'{new} is inserted'}"


class TurnReading(Entry):
    """The trajectories of a log that have several turns."""

    num_trajectories: int = 0
    num_turns: int = 0
    """After the first of their trajectory, without those that begin anew or repeat a prompt."""
    num_broken: int = 0
    """Of these, whose prompt begins with the prompt and the completion of no turn before."""
    num_broken_trajectories: int = 0
    num_restarts: int = 0
    """Turns that share no more than the first prompt with the turn before, and nothing after it: a sub-agent's, or
    after a summary.
    """
    num_joined: int = 0
    """Turns behind a break that `joined/` has as a trainer that joins the turns."""
    kinds: dict[str, int] = {}
    """The trajectories by the kind of their first break."""
    breaks: list[TurnBreak] = []
    """The first of these."""

    @property
    def broken_share(self) -> float:
        """The share of turns that break the prefix."""
        return self.num_broken / self.num_turns if self.num_turns else 0.0


class ExpertReading(Entry):
    """The experts that a log records, at the places that a trainer replays: each layer that has some, of the token
    before each sampled one.
    """

    num_layers: int
    num_chosen: int
    """Of a token in a layer."""
    empty_layers: list[int] = []
    """Layers of which nothing is recorded, as dense ones have nothing."""
    num_responses: int
    """That record experts."""
    num_misfits: int = 0
    """Of these, with other numbers of tokens, layers or experts than the others or their own ids."""
    num_places: int
    """Of all responses, in the layers that are not empty."""
    num_recorded: int
    num_invalid: int = 0
    """Recorded, with a number that is no expert."""
    num_repeated: int = 0
    """Recorded, with an expert twice."""
    shift: int = 0
    """By how many tokens the rows stand too late, as like tokens show that have like experts; 0 where none is seen."""

    @property
    def num_usable(self) -> int:
        return self.num_recorded - self.num_invalid - self.num_repeated

    @property
    def coverage(self) -> float:
        """The share of places whose experts can be replayed."""
        return self.num_usable / self.num_places if self.num_places else 0.0


class VersionReading(Entry):
    """The responses whose weights changed while they were sampled, as the log records it."""

    num_responses: int
    num_recorded: int
    """That name a version."""
    num_mixed: int
    """Of these, that name several."""
    rms_before: float | None = None
    """Of log(pi / mu) before the last change, over responses with both sides there, in nats."""
    rms_after: float | None = None
    times_before: float | None = None
    """The level of log(pi / mu) before the last change over that after it, at tokens of like probability; None: few."""
    is_level_changed: bool = False
    """The two differ beyond doubt, by a half at least."""

    @property
    def mixed_share(self) -> float:
        return self.num_mixed / self.num_recorded if self.num_recorded else 0.0


class KeptReading(Entry):
    """The sets of ids that an engine drew from, as top-p and its like left them."""

    num_responses: int
    """That record sets."""
    num_misfits: int = 0
    """Of these, with another number of sets than tokens."""
    num_tokens: int
    """Sampled, of all responses."""
    num_cut: int
    """Of these, with a set that is not empty."""
    num_inside: int
    """Of these, whose own id is in it."""
    shift: int = 0
    """By how many tokens the sets stand too late; 0 where they stand right or at no shift of one."""

    @property
    def coverage(self) -> float:
        """The share of sampled tokens with a set."""
        return self.num_cut / self.num_tokens if self.num_tokens else 0.0

    @property
    def agreement(self) -> float:
        """The share of sets that hold their token."""
        return self.num_inside / self.num_cut if self.num_cut else 1.0
