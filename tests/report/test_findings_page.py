"""What `headroom` and `localize` found, as a page of its own and on the page of a run."""

from pathlib import Path

import pytest

from mismatch_probe.dtypes import Dtype
from mismatch_probe.errors import BrokenRecord, RunDirectoryError
from mismatch_probe.records.examinations import Headroom
from mismatch_probe.records.findings import Findings, Localization
from mismatch_probe.records.run_directory import RunDirectory
from mismatch_probe.report.page import Filed, render_document, render_html, write_findings_report, write_report
from mismatch_probe.report.sections.interventions import best_part, together_sentence, tried_table, write_removed
from mismatch_probe.stats.results import Estimate
from tests.report import samples
from tests.report.documents import headroom, localization
from tests.report.pages import SCRIPTS, scripts_of
from tests.report.test_hostile import PAYLOADS
from tests.report.test_page import Structure

PAIR: samples.Pairs = ((Dtype.BF16, Dtype.BF16),)
DOCUMENTS = {
    "fits": headroom(),
    "does not fit": headroom(1e5),
    "weights only": headroom().model_copy(update=dict.fromkeys(("activations", "gradients", "plain", "bf16"))),
    "suspect": localization(suspect_layer=5),
    "no suspect": localization(Dtype.FP16),
    "no interventions": localization().model_copy(update={"interventions": None, "routers": [], "modules": []}),
}


def checked(page: str) -> Structure:
    found = Structure()
    found.feed(page)
    assert not found.open
    assert len(found.ids) == len(set(found.ids))
    assert {link for link in found.links if link} <= set(found.ids)
    return found


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_page_is_whole_offline_and_the_same_each_time(document: Headroom | Localization) -> None:
    page = render_document(document)
    found = checked(page)
    assert page == render_document(document)
    assert not [tag for tag, attributes in found.elements if "src" in attributes]
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


@pytest.mark.parametrize("document", DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_drawing_has_its_caption_and_a_table_under_it(document: Headroom | Localization) -> None:
    page = render_document(document)
    figures = page.split("<figure")[1:]
    for figure in figures:
        body = figure.split("</figure>")[0]
        assert "How to read it" in body
        assert "<table" in body
    assert bool(figures) == (document is not DOCUMENTS["weights only"])


def test_the_page_says_what_the_document_says() -> None:
    page = render_document(headroom(1e5))
    for words in ("does not fit", "model.layers.11 (add 2)", "65,504", "train and sample in BF16"):
        assert words in page
    page = render_document(localization(suspect_layer=5))
    for words in ("Layer 5: mlp.down_proj of the engine", "41 % (37 to 45)", "router: the model has none"):
        assert words in page


@pytest.mark.parametrize(
    ("slower", "words", "cell"),
    [
        (0.12, "takes 12 % more time.", "+12 %"),
        (-0.3, "takes 30 % less time.", "-30 %"),
        (0.004, "takes as long as before.", "+0 %"),
        (-0.004, "takes as long as before.", "+0 %"),
    ],
)
def test_what_a_part_costs_is_told_in_words(slower: float, words: str, cell: str) -> None:
    found = localization()
    assert found.interventions is not None
    best, *others = found.interventions.ranked
    ranked = [best.model_copy(update={"slower": slower}), *others]
    interventions = found.interventions.model_copy(update={"ranked": ranked})
    [sentence] = best_part(found.model_copy(update={"interventions": interventions}))
    assert sentence.endswith(f"of the token KL and {words}")
    assert cell in tried_table(interventions).rows[0]


@pytest.mark.slow
def test_a_run_shows_what_is_filed_in_it_and_nothing_otherwise() -> None:
    summary, manifest = samples.summary(PAIR), samples.manifest(PAIR)
    alone = render_html(summary, manifest)
    assert 'id="headroom"' not in alone
    page = render_html(summary, manifest, Filed([headroom(), localization(suspect_layer=5), localization(Dtype.FP16)]))
    found = checked(page)
    assert {"headroom", "localize-bf16-bf16", "localize-fp16-fp16"} <= set(found.ids)
    assert "<code>headroom.json</code>" in page


@pytest.mark.slow
def test_filed_documents_reach_the_report_of_their_run(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_summary(samples.summary(PAIR))
    run.write_manifest(samples.manifest(PAIR))
    Findings(tmp_path).write(headroom(1e5))
    assert "does not fit" in write_report(run).read_text()


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
def test_names_of_a_strangers_model_are_inert(payload: str) -> None:
    hostile = {"model": payload, "first_difference": payload, "enters": {"infer": payload, "train": payload}}
    document = localization(suspect_layer=5)
    suspect = document.suspects[0].model_copy(update={"place": payload, "sentence": payload, "infer_names": [payload]})
    page = render_document(document.model_copy(update={**hostile, "suspects": [suspect], "unmatched": [payload]}))
    checked(page)
    assert scripts_of(page) == SCRIPTS


def test_one_folder_is_one_page(tmp_path: Path) -> None:
    findings = Findings(tmp_path)
    with pytest.raises(RunDirectoryError, match="holds 0 results"):
        write_findings_report(findings)
    findings.write(headroom())
    assert write_findings_report(findings)[0].name == "report.html"
    findings.write(localization())
    with pytest.raises(RunDirectoryError, match="holds 2 results"):
        write_findings_report(findings)


def test_a_document_is_never_written_over(tmp_path: Path) -> None:
    findings = Findings(tmp_path)
    findings.write(headroom())
    with pytest.raises(RunDirectoryError, match="is there already"):
        findings.write(headroom(1e5))
    assert findings.headroom() == headroom()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1}', '{"schema_version": 99}'])
def test_a_damaged_document_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "headroom.json").write_text(text)
    with pytest.raises(BrokenRecord, match=r"headroom\.json"):
        Findings(tmp_path).documents()


def test_what_moves_no_response_has_no_interval() -> None:
    assert write_removed(Estimate(0.0, 0.0, 0.0, 0.95, 16, 8000, "token")) == "0 %"
    assert write_removed(Estimate(0.2, 0.08, 0.32, 0.95, 16, 8000, "token")) == "20 % (8 to 32)"


@pytest.mark.parametrize(
    ("share", "total", "words"),
    [
        (0.22, 0.3, "together removed 22 % (18 to 26) of the KL; one by one, they removed 30 % in all."),
        (-0.55, -1.06, "together added 55 % (51 to 59) to the KL; one by one, they added 106 % in all."),
    ],
)
def test_parts_that_make_the_mismatch_larger_are_said_to_add_to_it(share: float, total: float, words: str) -> None:
    interventions = localization().interventions
    assert interventions is not None
    removed = Estimate(share, share - 0.04, share + 0.04, 0.95, 16, 1600, "token")
    together = interventions.ranked[1].model_copy(update={"removed": removed})
    result = interventions.model_copy(update={"together": together, "sum_of_removed": total})
    assert together_sentence(result) == f"All parts of the training path {words}"
