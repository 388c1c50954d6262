"""The viewer in a real browser: curves, zoom, samples, evaluation, timeline, settings, and hostile text."""

import json

import browser
import pytest
from viewed_runs import STEPS, append_steps, write_runs

from jaxrlhf.viewer import ViewServer
from jaxrlhf.viewer.run_files import RunFiles

pytestmark = [pytest.mark.slow, pytest.mark.skipif(browser.FOUND is None, reason="no Chromium; apt install chromium")]
LINES = "document.querySelectorAll('[data-metric=\"score/mean\"] path.line')"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = write_runs(tmp_path_factory.mktemp("runs"))
    (root / "foreign").mkdir()
    (root / "foreign" / "metrics.jsonl").write_text('{"loss": 1}\n{"loss": 2}\n')
    with (
        ViewServer(RunFiles(root), port=0) as server,
        browser.Browser(tmp_path_factory.mktemp("profile")) as one,
    ):
        one.root = root
        one.open(server.address)
        one.wait(f"{LINES}.length == 2")
        yield one
        assert one.complaints == []
        assert one.value("window.hacked") is None


def tab(page, name: str, ready: str) -> None:
    page.value(f"[...document.querySelectorAll('#tabs button')].find(b => b.textContent == {name!r}).click()")
    page.wait(ready)


def write(page, selector: str, value: str) -> None:
    change = f"e.value = {value!r}; e.dispatchEvent(new Event('input'))"
    page.value(f"(e => {{ {change} }})(document.querySelector({selector!r}))")


def choose(page, place: int, value: str) -> None:
    change = f"e.value = {value!r}; e.dispatchEvent(new Event('change'))"
    page.value(f"(e => {{ {change} }})(document.querySelectorAll('main select')[{place}])")


def test_metrics_of_several_runs_with_explanations(page):
    card = "document.querySelector('[data-metric=\"score/mean\"]')"
    assert "without unscorable ones" in page.value(f"{card}.textContent")
    names = page.value("[...document.querySelectorAll('[data-metric]')].map(e => e.dataset.metric)")
    assert names == ["score/mean", "kl/ref", "time/step_s", "mine"]
    assert "a metric of your own" in page.value("document.querySelector('[data-metric=mine]').textContent")
    write(page, "input[type=search]", "kl")
    assert page.value("document.querySelectorAll('[data-metric]').length") == 1
    write(page, "input[type=search]", "")


def test_unreadable_run_is_listed_with_the_reason(page):
    labels = page.value("[...document.querySelectorAll('#runs label')].map(e => e.textContent)")
    assert "foreign" in labels[0] and "line 1, is not a JSON object with a 'step'" in labels[0]
    assert [label.split()[1:] for label in labels[1:3]] == [["one", "step", str(STEPS)], ["two", "step", str(STEPS)]]


def test_curve_is_smoothed_and_zoomed(page):
    path = f"{LINES}[0].getAttribute('d')"
    raw = page.value(path)
    assert raw.count("L") == STEPS - 1
    write(page, "#smoothing", "0.9")
    smooth = page.value(path)
    assert smooth != raw and smooth.count("L") == STEPS - 1
    write(page, "#smoothing", "0")
    page.drag('[data-metric="score/mean"] svg', 0.5, 0.9)
    assert 10 < page.value(path).count("L") < 25
    page.value("[...document.querySelectorAll('button')].find(b => b.textContent == 'all steps').click()")
    assert page.value(path) == raw


def test_samples_are_grouped_by_prompt_and_searchable(page):
    tab(page, "Samples", "document.querySelectorAll('article').length == 8")
    assert page.value("document.querySelectorAll('section.group').length") == 2
    text = page.value("document.querySelector('#samples').textContent")
    assert "<script>window.hacked=1</script>" in text and 'calculator({"expression":"0+40"})' in text
    assert page.value("document.querySelectorAll('#samples img, #samples script').length") == 0
    write(page, "input[type=search]", "1 apples and")
    assert page.value("document.querySelector('#count').textContent").startswith("3 of 8 responses to 1 prompts")
    write(page, "input[type=search]", "")
    choose(page, 2, "none")
    assert page.value("document.querySelectorAll('article.none').length") == 2
    choose(page, 2, "all")
    choose(page, 1, "3")
    page.wait("document.querySelector('#samples').textContent.includes('0 apples and 3 pears')")


def test_tokens_are_coloured_by_their_numbers(page):
    tab(page, "Samples", "document.querySelectorAll('article').length == 8")

    def shown(of: str) -> list:
        spans = "[...document.querySelectorAll('article')[0].querySelectorAll('.token')]"
        return page.value(f"{spans}.map(e => {of})")

    choose(page, 1, "3")
    page.wait("document.querySelector('#samples').textContent.includes('0 apples and 3 pears')")
    assert shown("e") == []
    choose(page, 4, "logp")
    assert "".join(shown("e.textContent")) == "0 apples and 3 pears make 3. \u25aa"
    strength = [float(colour.split(",")[-1].strip(" )")) for colour in shown("e.style.background")]
    assert strength[:4] == pytest.approx([0.0, 0.15, 0.3, 0.0], abs=1 / 255)  # of log-probabilities 0, -1, -2, 0
    assert shown("e.title")[1] == "log-probability -1\nentropy 0.5\nsampler gap 1.00e-6"
    assert page.value("document.querySelectorAll('#samples img, #samples script').length") == 0
    assert page.value("document.querySelectorAll('article .tokens').length") == 6
    choose(page, 4, "gap")
    strength = [float(colour.split(",")[-1].strip(" )")) for colour in shown("e.style.background")]
    assert strength[:5] == pytest.approx([0, 0, 0.125, 0.25, 0.375], abs=1 / 255)  # from 1e-6 on
    choose(page, 4, "entropy")
    assert page.value("document.querySelectorAll('article .tokens').length") == 3
    choose(page, 4, "")
    assert shown("e") == []


def test_evaluation_answers_over_steps(page):
    tab(page, "Evaluation", "document.querySelectorAll('#evaluation td.score').length == 12")
    scores = page.value("[...document.querySelectorAll('#evaluation td.score')].map(e => e.textContent)")
    assert scores[9:] == ["0", "0", "1"]
    page.value("document.querySelector('#evaluation td.score').click()")
    page.wait("document.querySelectorAll('#evaluation article').length == 3")


def test_timeline_has_every_call_and_is_zoomed(page):
    tab(page, "Timeline", "document.querySelectorAll('#timeline rect.call').length")
    assert page.value("document.querySelectorAll('#timeline rect.call').length") == 3 * STEPS
    page.drag("#timeline", 0.5, 0.7)
    assert 0 < page.value("document.querySelectorAll('#timeline rect.call').length") < 2 * STEPS


def test_differing_settings_are_shown(page):
    tab(page, "Settings", "document.querySelectorAll('#settings tr.differs').length")
    rows = page.value("[...document.querySelectorAll('#settings tr.differs')].map(r => r.firstChild.textContent)")
    assert rows == ["name", "seed"]


def test_late_response_does_not_replace_a_newer_one(page):
    tab(page, "Samples", "document.querySelectorAll('article').length == 8")
    wait = "new Promise(done => setTimeout(done, 500))"
    late = f"String(address).includes('step=3') ? {wait}.then(() => window.whole(address)) : window.whole(address)"
    page.value(f"window.whole = window.fetch; window.fetch = address => {late}")
    try:
        choose(page, 1, "3")
        choose(page, 1, "4")
        page.value(wait.replace("500", "700"))
        assert "0 apples and 4 pears" in page.value("document.querySelector('#samples').textContent")
        choose(page, 1, "3")
        tab(page, "Metrics", f"{LINES}.length == 2")
        page.value(wait.replace("500", "700"))
        assert page.value(f"{LINES}.length") == 2
    finally:
        page.value("window.fetch = window.whole")


def test_running_run_is_followed_after_a_resume(page):
    tab(page, "Metrics", f"{LINES}.length == 2")
    append_steps(page.root / "one", range(STEPS + 1, STEPS + 6), 0, resumed_step=STEPS)
    page.wait(f"{LINES}[0].getAttribute('d').split('L').length == {STEPS + 5}")
    append_steps(page.root / "one", range(21, 31), 0, resumed_step=20)
    page.wait(f"{LINES}[0].getAttribute('d').split('L').length == 30")
    assert json.loads((page.root / "one" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 30
