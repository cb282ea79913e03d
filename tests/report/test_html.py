"""The page in a browser: every chart drawn, nothing logged as an error, nothing asked of the network."""

import base64
import itertools
import math
import re
from dataclasses import replace

import pytest
from plotly.offline import get_plotlyjs

import halfstep.explain.report.html
from docs.browser import find_browser
from halfstep import FULL, Rule
from halfstep.explain.report.html import page_html
from halfstep.explain.report.run import read_log
from halfstep.later import COLUMNS
from halfstep.records import Finding, Verdict
from tests.report.logs import START, seen, step, write

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed here")


def opened(browser, folder, *records, name="page"):
    """Opens the page of a log of these records and returns the browser."""
    path = folder / f"{name}.html"
    path.write_text(page_html(read_log(write(folder / "run.jsonl", records))), encoding="utf-8")
    browser.open(path)
    return browser


@pytest.fixture
def show(browser, tmp_path):
    return lambda *records: opened(browser, tmp_path, *records)


def kept(browser, folder, name, records):
    """Opens a page, which stays open for the tests that follow each other and share it."""
    if not browser.run("location.pathname").endswith(f"/{name}.html"):
        opened(browser, folder, *records, name=name)
    return browser


@pytest.fixture
def run_page(browser, tmp_path):
    return kept(browser, tmp_path, "run", run_of())


@pytest.fixture
def stopped_page(browser, tmp_path):
    return kept(browser, tmp_path, "stopped", STOPPED)


def choose(browser, name, value, event="change"):
    """Sets a control to an option with this text, or to this value, as a person would."""
    browser.run(f"""(() => {{
        const control = document.getElementById({name!r});
        const option = [...(control.options ?? [])].find(each => each.text === {value!r});
        control.value = option ? option.value : {value!r};
        control.dispatchEvent(new Event({event!r}));
    }})()""")


def words(browser, name):
    return browser.run(f"document.getElementById({name!r}).textContent")


def words_of(browser, selector):
    return browser.run(f"[...document.querySelectorAll({selector!r})].map(each => each.textContent)")


def count(browser, selector):
    return browser.run(f"document.querySelectorAll({selector!r}).length")


def run_of(steps=6):
    """A run in fp16: gradients that lie partly below its range, a scale that moves them into it, one skipped step."""
    yield START
    yield Finding("warning", "eps", "norm", "eps 1e-8 is 0 in fp16", "1e-6 or more")
    for number in range(1, steps + 1):
        skipped, scale = number == 3, 1024 if number < 4 else 512
        yield step(number, skipped=skipped, scale=scale, norm=math.inf if skipped else number, loss=10 / number)
        for module, powers in (("body", {-28: 2, -20: 1}), ("head", {-10: 3, 0: 1})):
            scaled = {power + (10 if number < 4 else 9): n for power, n in powers.items()}
            yield seen(number, module, scaled, scale=scale, infinities=int(skipped))
            yield seen(number, module, {-3: 5}, kind="activation", zeros=5)
    yield Verdict("head", "mul", "backward", "scale too high", "a.py:3", (), "inf at scale 1024", "lower it")


def test_every_chart_is_drawn_without_an_error_or_a_request(run_page):
    browser = run_page
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
    assert sum(url.startswith("file:") for url in browser.requests) == 1  # the page itself
    assert browser.run("[...document.querySelectorAll('.chart')].map(chart => chart.id)") == [
        "timeline", "histogram", "small-map", "saturated-map"
    ]  # fmt: skip
    assert count(browser, "#timeline .scatterlayer .trace") == 4  # loss, norm, scale, skips
    assert count(browser, "#timeline .scatterlayer .js-line") == 4  # the norm in two parts, around the skipped step
    assert count(browser, "#timeline .scatterlayer path.point") == 1
    assert count(browser, "#histogram .barlayer .trace") == 2
    assert count(browser, "#histogram .shapelayer path") == 5  # three lines, two shaded ranges
    for name in ("small-map", "saturated-map"):
        assert browser.run(f"document.querySelector('#{name} .heatmaplayer image').getBBox().width") > 100
    assert count(browser, "table.rows tbody tr") == 2
    assert words(browser, "shift-value") == "2^9 = 512"  # the last scale
    assert words(browser, "timeline-words").startswith("1 of 6 steps were skipped")
    assert browser.run("document.getElementById('map-measure').value") == "lost"


def test_every_module_kind_and_format_can_be_chosen(run_page):
    browser = run_page
    for name in ("kind", "map-kind", "map-measure", "format", "module"):
        for option in browser.run(f"[...document.getElementById({name!r}).options].map(option => option.text)"):
            choose(browser, name, option)
            assert count(browser, "#histogram .barlayer .trace") >= 1
    assert browser.errors == []


def test_a_module_stays_chosen_when_other_tensors_are(run_page):
    choose(run_page, "kind", "weight_grad")
    choose(run_page, "module", "head")
    choose(run_page, "kind", "activation")
    assert "activation in head" in words(run_page, "histogram-words")
    choose(run_page, "kind", "weight_grad")


def test_the_words_say_how_much_lies_left_of_the_red_line_and_where_the_scale_moves_it(run_page):
    browser = run_page
    choose(browser, "kind", "weight_grad")
    choose(browser, "format", "fp16")
    choose(browser, "module", "body")
    choose(browser, "shift", "0", "input")
    # of three values two are 2^-28, below half of fp16's smallest subnormal 2^-24, and one is 2^-20, below 2^-14
    assert "as they are: 66.7% lie left of the red line" in words(browser, "histogram-words")
    assert "33.3% lie between" in words(browser, "histogram-words")
    assert "Times a loss scale" not in words(browser, "histogram-words")
    choose(browser, "shift", "3", "input")
    moved = words(browser, "histogram-words").partition("Times a loss scale of 8: ")[2]
    assert moved.startswith("0% lie left of the red line")
    choose(browser, "shift", "2", "input")
    moved = words(browser, "histogram-words").partition("Times a loss scale of 4: ")[2]
    assert moved.startswith("66.7% lie left of the red line")
    assert browser.run("document.getElementById('histogram').data[1].x[0]") == -28 + 0.5 + 2


def test_the_loss_scale_that_is_too_high_is_seen(run_page):
    browser = run_page
    choose(browser, "kind", "weight_grad")
    choose(browser, "format", "fp16")
    choose(browser, "module", "head")
    choose(browser, "shift", "16", "input")
    moved = words(browser, "histogram-words").partition("Times a loss scale of 65,536: ")[2]
    assert "25% lie right of the last line" in moved  # 2^0 of {2^-10: 3, 2^0: 1}
    choose(browser, "shift", "15", "input")
    moved = words(browser, "histogram-words").partition("Times a loss scale of 32,768: ")[2]
    assert "; 0% lie right of the last line" in moved


def test_what_carries_no_loss_scale_is_not_moved(run_page):
    browser = run_page
    choose(browser, "kind", "activation")
    choose(browser, "module", "body")
    assert browser.run("getComputedStyle(document.getElementById('shift-label')).display") == "none"
    assert count(browser, "#histogram .barlayer .trace") == 1
    assert "50% were zero" in words(browser, "histogram-words")


def test_the_maps_show_shares_by_module_and_step(run_page):
    browser = run_page
    choose(browser, "map-kind", "weight_grad")
    share = browser.run("Array.from(document.getElementById('saturated-map').data[0].customdata, row => [...row])")
    assert share[0] == pytest.approx([0, 0, 0.25, 0, 0, 0])  # one infinity to three values at the skipped step
    assert share[1] == pytest.approx([0, 0, 0.2, 0, 0, 0])
    assert browser.run("document.getElementById('saturated-map').data[0].y") == ["body", "head"]


def test_charts_fit_on_the_paper(run_page):
    data = run_page.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"]
    sizes = re.findall(rb"/MediaBox \[0 0 ([0-9.]+)", base64.b64decode(data))
    points = float(sizes[0])
    widest = run_page.run("Math.max(...[...document.querySelectorAll('.chart')].map(each => each.clientWidth))")
    assert points / 0.75 > widest + 2 * 24


def test_the_loss_can_be_drawn_on_a_log_scale_and_the_window_resized_then(run_page, request):
    browser = run_page
    kind = "document.getElementById('timeline').layout.yaxis.type"
    assert browser.run(kind) == "linear"
    browser.run("document.getElementById('log-loss').click()")
    assert browser.run(kind) == "log"
    request.addfinalizer(lambda: browser.run("document.getElementById('log-loss').click()"))
    request.addfinalizer(lambda: browser.resize(1280))
    browser.resize(700)
    assert browser.run("document.getElementById('timeline').clientHeight") == 560  # not 0, below what follows


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.slow_but("390")
def test_charts_follow_the_readers_colors_and_fit_the_window(show, browser, width, request):
    request.addfinalizer(lambda: browser.call("Emulation.setEmulatedMedia", features=[]))
    request.addfinalizer(lambda: browser.resize(1280))
    browser.resize(width)
    show(*run_of())
    for mode, text in (("light", "rgb(28, 39, 51)"), ("dark", "rgb(220, 227, 234)")):
        browser.prefer(mode)
        fill = "getComputedStyle(document.querySelector('#timeline .xtick text')).fill"
        assert browser.run(f"new Promise(done => setTimeout(() => done({fill}), 200))") == text
        assert browser.run("getComputedStyle(document.body).color") == text
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert browser.errors == []


@pytest.mark.slow
def test_a_page_is_below_two_megabytes_whichever_plotly_there_is(show, tmp_path, monkeypatch):
    monkeypatch.setattr(halfstep.explain.report.html, "_PLOTLY", None)
    monkeypatch.setattr(halfstep.explain.report.html, "get_plotlyjs", get_plotlyjs, raising=False)
    browser = show(*run_of())
    assert browser.errors == []
    assert 1_800_000 < next(tmp_path.glob("*.html")).stat().st_size < 2_000_000


def test_a_page_says_where_a_browser_is_too_old(browser, tmp_path):
    page = page_html(read_log(write(tmp_path / "run.jsonl", run_of())))
    old = tmp_path / "old.html"
    old.write_text(page.replace("new DecompressionStream", "new NoSuchStream"), encoding="utf-8")
    browser.open(old)
    assert "They need a browser of 2023 or later" in words_of(browser, ".notes")[0]


@pytest.mark.slow
def test_a_number_of_the_steps_that_has_no_chart_gets_one_below_the_others(show, monkeypatch):
    monkeypatch.setattr(halfstep.explain.report.html, "COLUMNS", (*COLUMNS, "step"))
    browser = show(START, *(step(number, loss=1.0) for number in (1, 2)))
    assert browser.errors == []
    assert words_of(browser, ".g-y4title") == ["step"]
    assert browser.run("document.getElementById('timeline').layout.yaxis4.domain[0]") == 0


@pytest.mark.slow
def test_half_the_smallest_subnormal_is_lost_where_no_value_is_larger(show):
    browser = show(START, step(1), seen(1, "body", {-25: 3}))
    for name in ("timeline", "small-map", "saturated-map"):  # nothing is marked without a verdict
        assert browser.run(f"document.getElementById('{name}').layout.shapes.length") == 0
    assert "as they are: 100% lie left of the red line" in words(browser, "histogram-words")
    assert "100% of them are lost" in words(browser, "histogram-words")
    choose(browser, "shift", "1", "input")
    assert "Times a loss scale of 2: 0% lie left of the red line" in words(browser, "histogram-words")


@pytest.mark.parametrize(("power", "text"), [(-2, "2^-2 = 0.250"), (30, "2^30 = 1,073,741,824")])
@pytest.mark.slow_but("30")
def test_the_page_opens_at_the_scale_of_the_run_whatever_it_is(show, power, text):
    browser = show(START, step(1, scale=2.0**power), seen(1, "body", {-20: 3}, scale=2.0**power))
    assert words(browser, "shift-value") == text
    assert browser.run("document.getElementById('histogram').data[1].x[0]") == -20 + 0.5


@pytest.mark.slow
def test_one_value_beyond_the_largest_counts_as_one(show):
    one = seen(1, "body", {0: 3, 15: 1})
    browser = show(START, step(1), replace(one, stats=replace(one.stats, amax=65520.0)))
    assert "25% lie right of the last line" in words(browser, "histogram-words")


RULE = Rule("h.1", FULL)
STOPPED = (
    START,
    *(step(number, scale=8, loss=1, skipped=number in (3, 4)) for number in range(1, 5)),
    *(seen(4, name, {0: 3}, kind="activation") for name in ("h.0", "h.1", "h.2")),
    seen(4, "h.1", {0: 3}, kind="weight"),
    Verdict(
        "h.1", "mul", "forward", "overflow", "a.py:3", (RULE,), "inf", "plan.edit(Rule('h.1', FULL)); tried: it trains"
    ),
)


def test_a_page_begins_with_how_the_run_went_and_ends_with_what_it_was(stopped_page):
    browser = stopped_page
    assert browser.run("document.body.firstElementChild.innerText").startswith(
        "Stopped at step 4: mul in h.1 overflows in fp16 from step 3"
    )
    assert count(browser, "header.bad") == 1
    assert browser.run("document.querySelector('details').open") is False
    assert "dynamic loss scale" in browser.run("document.querySelector('details').textContent")
    assert browser.run("document.querySelector('details').nextElementSibling.localName") == "script"


def test_the_verdict_is_marked_on_the_time_axis(stopped_page):
    browser = stopped_page
    (line,) = browser.run("document.getElementById('timeline').layout.shapes")
    assert (line["x0"], line["x1"], line["y0"], line["y1"]) == (4, 4, 0, 1)
    assert browser.run("document.querySelector('#timeline .annotation-text').textContent") == "verdict: overflow"


def test_the_map_and_the_histogram_open_on_what_the_verdict_is_about(stopped_page):
    browser = stopped_page
    chosen = "['map-kind', 'kind', 'module'].map(id => document.getElementById(id).selectedOptions[0].text)"
    assert browser.run(chosen) == ["activation", "activation", "h.1"]
    for name in ("small-map", "saturated-map"):
        (mark,) = browser.run(f"document.getElementById('{name}').layout.shapes")
        assert (mark["y0"], mark["y1"]) == (0.5, 1.5)  # the second row
        assert "▸ h.1" in browser.run(f"document.getElementById('{name}').textContent")
    assert browser.run("document.getElementById('small-map').data[0].y") == ["h.0", "h.1", "h.2"]


def test_an_edit_is_there_once_and_can_be_copied(stopped_page):
    browser = stopped_page
    text = browser.run("document.querySelector('.rows').innerText")
    assert text.count("plan.edit(") == text.count("Rule(") == 1
    assert browser.run("document.querySelector('.edit code').textContent") == "plan = plan.edit(Rule('h.1', FULL))"
    browser.run("window.copied = []; navigator.clipboard.writeText = async text => { window.copied.push(text); }")
    browser.run("document.querySelector('.edit button').click()")
    assert browser.run("window.copied") == ["plan = plan.edit(Rule('h.1', FULL))"]
    assert browser.run("getSelection().toString()") == "plan = plan.edit(Rule('h.1', FULL))"
    assert browser.run("document.querySelector('.edit button').textContent") == "copied"


def test_without_a_clipboard_the_edit_is_selected(stopped_page):
    browser = stopped_page
    browser.run(
        "navigator.clipboard.writeText = async () => { throw new Error('no'); }; document.execCommand = () => false"
    )
    browser.run("document.querySelector('.edit button').click()")
    assert browser.run("getSelection().toString()") == "plan = plan.edit(Rule('h.1', FULL))"
    assert browser.run("document.querySelector('.edit button').textContent") == "press Ctrl+C"


def test_paper_has_what_is_folded(stopped_page):
    browser = stopped_page
    browser.call("Page.printToPDF")
    assert browser.run("document.querySelector('details').open") is True


@pytest.mark.slow
def test_a_label_in_a_map_of_many_modules_is_there_for_the_one_in_focus(show):
    modules = [f"h.{number}" for number in range(150)]
    some = [seen(4, name, {-30: 3}, kind="activation") for name in modules]
    given = Verdict("h.100", "mul", "forward", "overflow", None, (), "inf", "do")
    browser = show(START, step(4, skipped=True), *some, given)
    labels = browser.run("document.getElementById('small-map').layout.yaxis.tickvals")
    assert "h.100" in labels
    assert len(labels) == 50 + 1  # every third of 150, which "h.100" is not


def test_the_page_lets_no_script_reach_a_network(show):
    browser = show(START, step(1))
    browser.run("fetch('https://example.org/').catch(() => null)")
    assert any("Content Security Policy" in error for error in browser.errors)


@pytest.mark.slow
def test_a_column_of_a_map_is_what_was_observed_and_no_steps_between(show):
    browser = show(START, *(seen(number, "m", {-30: 1}) for number in (1, 5000, 5001)))
    cells = browser.run("document.querySelector('#small-map .xaxislayer-above').textContent")
    assert cells == "150005001"


@pytest.mark.parametrize("width", [400, 1240])
@pytest.mark.slow_but("400")
def test_nothing_is_cut_or_written_over_in_a_narrow_window(browser, tmp_path, width):
    verdict = Verdict("blocks.0.mlp", "mul", "backward", "scale too high", "a.py:3", (), "words " * 30, "words " * 30)
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        opened(browser, tmp_path, *run_of(), verdict)
        assert browser.run("document.documentElement.scrollWidth") == width
        assert (
            browser.run("Math.max(...[...document.querySelectorAll('.rows td')].map(each => each.clientHeight))") < 300
        )
        labels = browser.run("""[...document.querySelectorAll('#histogram .annotation-text')].map(each => {
            const {left, right, top} = each.getBoundingClientRect();
            return {left, right, top};
        })""")
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")
    assert len(labels) == 3
    assert all(label["left"] >= 0 and label["right"] <= width for label in labels)
    for a, b in itertools.combinations(labels, 2):
        assert a["right"] <= b["left"] or b["right"] <= a["left"] or abs(a["top"] - b["top"]) >= 14


@pytest.mark.slow
def test_a_tensor_that_is_stored_low_is_said_to_hide_what_it_lost(show):
    browser = show(START, step(1), seen(1, "body", {-20: 1}, fmt="fp16", zeros=3))
    assert browser.run("document.getElementById('map-measure').value") == "small"
    assert "stored in fp16" in words(browser, "maps-words")
    assert "stored in fp16" in words(browser, "histogram-words")


@pytest.mark.slow
def test_updates_are_judged_by_what_the_stored_weight_can_follow(show):
    browser = show(START, step(1), seen(1, "body", {-2: 3, -1: 1}, kind="update", fmt="bf16"))
    assert "75% lie left of the red line, half a unit in the last place" in words(browser, "histogram-words")
    assert count(browser, "#histogram .shapelayer path") == 3  # one line, two shaded ranges of which one is empty
    assert words(browser, "maps-words") == ""
    assert browser.errors == []


def test_names_and_texts_cannot_become_part_of_the_page(show):
    evil = "</script><script>window.broken = true</script><img src=x onerror='window.broken = true'>"
    browser = show(START, step(1, loss=1), seen(1, evil, {0: 1}), Finding("error", evil, evil, evil, evil))
    choose(browser, "module", evil)
    assert browser.run("window.broken") is None
    assert evil in words(browser, "histogram-words")
    assert count(browser, "img") == 0
    assert browser.errors == []


@pytest.mark.parametrize(
    ("records", "hidden"),
    [((), 3), ((START, step(1)), 2), ((seen(1, "m", {0: 1}),), 1), ((START, seen(1, "m", {}, zeros=4), step(1)), 0)],
    ids=["nothing", "no observations", "no steps", "zeros only"],
)
@pytest.mark.slow_but("no observations")
def test_a_log_that_lacks_something_is_a_page_that_says_so(show, records, hidden):
    browser = show(*records)
    assert count(browser, "section[hidden]") == hidden
    assert browser.errors == []
    assert (count(browser, ".notes li") > 0) == (hidden > 0)


@pytest.mark.slow
def test_a_run_of_one_step_whose_loss_is_not_finite(show):
    browser = show(START, step(1, loss=math.nan, norm=math.nan, skipped=True, scale=2))
    assert "not finite" in words(browser, "timeline-words")
    assert count(browser, "#timeline .scatterlayer path.point") >= 2
    assert browser.errors == []


def test_a_single_step_is_a_point_and_so_is_a_value_between_two_that_are_not_finite(show):
    browser = show(START, step(1, norm=1, loss=1))
    assert count(browser, "#timeline .scatterlayer path.point") == 3  # loss, norm, scale
    losses = (1, 2, math.nan, 3, math.nan)
    browser = show(START, *(step(number, loss=loss) for number, loss in enumerate(losses, start=1)))
    assert browser.run("[...document.getElementById('timeline').data.slice(3).map(each => [...each.x])]") == [
        [4],
        [3, 5],
    ]


@pytest.mark.parametrize("scales", [[1] * 9, [2.0**n for n in range(16)]])
@pytest.mark.slow
def test_each_label_of_the_loss_scale_is_a_power_of_its_own(show, scales):
    browser = show(START, *(step(number, scale=scale) for number, scale in enumerate(scales, start=1)))
    labels = browser.run("[...document.querySelectorAll('#timeline .y3tick text')].map(each => each.textContent)")
    assert len(set(labels)) == len(labels) > 0


@pytest.mark.slow
def test_a_map_of_values_that_were_not_there_says_so(show):
    browser = show(START, *(step(number) for number in (1, 2)), *(seen(number, "m", {}, zeros=4) for number in (1, 2)))
    titles = browser.run("[...document.querySelectorAll('figcaption')].map(each => each.textContent)")
    assert titles[0].endswith("rounds to zero: no such value was observed")
    assert titles[1].endswith("or not finite: none")
    assert browser.run("document.getElementById('small-map').layout.xaxis.range") == [-0.5, 1.5]
