from mismatch_probe.engines.vllm.launch import FinishedRequests


def test_finished_requests_are_told_and_nothing_is_drawn(capfd):
    messages = []
    bar = FinishedRequests(lambda done, of: messages.append((done, of)), total=3, desc="Processed prompts")
    for _ in range(3):
        assert bar.format_dict["elapsed"] >= 0
        bar.postfix = "est. speed"
        bar.update(1)
    bar.refresh()
    bar.close()
    assert messages == [(1, 3), (2, 3), (3, 3)]
    assert capfd.readouterr() == ("", "")


def test_requests_that_are_only_prepared_are_handed_through_untold():
    messages = []
    assert list(FinishedRequests(lambda done, of: messages.append(done), ["a", "b"], desc="Rendering prompts")) == [
        "a",
        "b",
    ]
    assert messages == []
