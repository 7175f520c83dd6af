"""What gloo and NCCL say when a rank is gone is an error that names a lost rank; every other error stays what it is."""

import pytest

from mismatch_probe.errors import RankLost
from mismatch_probe.training_path.rank_group import lost_ranks_named

CRASHED = (
    "[pair.cc:552] Connection closed by peer [127.0.0.1]:3412. This is typically caused by a remote worker crashing."
)
HANGS = "[pair.cc:144] no answer. This is typically caused by a remote worker hanging or bugs in the application."


@pytest.mark.parametrize("message", [CRASHED, HANGS, "NCCL error: remote process exited"])
def test_the_words_of_a_lost_rank_name_one(message: str) -> None:
    with pytest.raises(RankLost, match="another rank that holds a part of the model is gone"), lost_ranks_named():
        raise RuntimeError(message)


def test_another_error_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="shapes") as raised, lost_ranks_named():
        raise RuntimeError("shapes cannot be multiplied")
    assert not isinstance(raised.value, RankLost)
