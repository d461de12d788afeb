"""What the benchmark counts, the ratios that it gives, and the page and chart that are made from a result."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import cases
import report

BARS = {"figures": {"fwd-d128-full-4k": 680, "host-forward": 12}, "ratios": [["fwd-d96-*", 1.0], ["fwd-*", 0.9]]}


def row(name, ours, flash=None, cudnn=None, unit="TFLOP/s", refusals=None):
    figures = {"flash_attn": ours, "FLASH": flash, "CUDNN": cudnn}
    return {
        "name": name,
        "group": name.split("-")[0],
        "unit": unit,
        "figures": {provider: value for provider, value in figures.items() if value is not None},
        "refusals": refusals or {},
    }


@pytest.fixture
def result():
    state = {"sm_mhz": 1980, "memory_mhz": 3201, "celsius": 55, "watts": "600", "driver": "580.1"}
    return {
        "schema": 1,
        "environment": {
            "date": "2026-12-01T03:00:00+00:00", "gpu": "NVIDIA H200", "capability": "9.0", "multiprocessors": 132,
            "driver": "580.1", "torch": "2.11.0", "cuda": "13.0", "cudnn": 91900, "flash_attn": "2.9.0",
            "compiler": "nvrtc 12.9.86", "commit": "0123456789ab", "before": state, "after": None,
        },
        "ceilings": {"gemm-bf16": 800.0, "copy": 4200.0},
        "rows": [
            row("fwd-d128-full-4k", 730.0, 340.0, 660.0),
            row("fwd-d96-causal-1k", 200.0, 250.0, refusals={"CUDNN": "No <available> kernel"}),
            row("decode-slabs-b1-8k-q1", 1840.0, unit="GB/s"),
            row("host-forward", 15.0, 18.0, unit="us"),
        ],
    }  # fmt: skip


def test_operations_are_counted_as_kernels_md_counts_them():
    forward = cases.Attention("fwd", 128, False, "4k")
    assert forward.sequences == (4096,) * 4
    assert forward.heads == 16
    assert forward.work() == 4 * 4 * 16 * 4096 * 4096 * 128
    assert cases.Attention("fwd", 128, True, "4k").work() == forward.work() / 2
    assert cases.Attention("bwd", 128, False, "4k").work() == forward.work() * 2.5
    assert cases.figure(forward, 1.0) == forward.work() / 1e9
    window = cases.Attention("feature", 128, True, "4k", window=1023)
    assert window.work() == 4 * 4 * 16 * 128 * (1024 * 1024 / 2 + 3072 * 1024)
    assert (
        cases.Attention("feature", 128, True, "1k", window=4096).work()
        == cases.Attention("fwd", 128, True, "1k").work()
    )
    packed = cases.Attention("varlen", 64, False, "mixed", (3, 5))
    assert packed.work() == 4 * 32 * (9 + 25) * 64


def test_features_are_in_the_name():
    gpt = cases.Attention("feature", 64, True, "4k", window=127, sink=True, queries_per_key=8)
    assert gpt.name == "feature-d64-window127-sink-4k"
    assert (gpt.heads, gpt.heads_kv) == (32, 4)
    assert cases.Attention("feature", 256, True, "4k", softcap=50.0).name == "feature-d256-causal-softcap-4k"


def test_bytes_of_decoding_are_those_of_keys_and_values():
    case = cases.Decoding("decode", "pages", 16, "8k", 1)
    assert case.work() == 2 * 16 * 8192 * 8 * 128 * 2
    assert cases.figure(case, 1.0) == case.work() / 1e6
    assert cases.figure(cases.Host("forward"), 0.012) == pytest.approx(12.0)


def test_mixed_lengths_fill_the_batch():
    lengths = cases.mixed_lengths(16384, 24)
    assert len(lengths) == 24
    assert sum(lengths) == 16384
    assert list(lengths) == sorted(lengths)


def test_cases_have_names_of_their_own_and_every_bar_has_a_case():
    names = [case.name for case in cases.all_cases()]
    assert len(names) == len(set(names))
    bars = cases.load_bars()
    assert set(bars["figures"]) <= set(names)
    assert all(cases.selected([pattern]) for pattern, _ in bars["ratios"])
    assert all(case.group in cases.UNITS and case.group in report.TITLES for case in cases.all_cases())


def test_selecting():
    assert {case.name for case in cases.selected(["fwd-d128-full-*"])} == {
        f"fwd-d128-full-{n}" for n in ("1k", "4k", "16k")
    }
    assert cases.selected([]) == cases.all_cases()
    assert not cases.selected(["nothing"])


def test_more_is_better_but_for_times():
    assert cases.better("TFLOP/s", 300.0, 200.0) == 1.5
    assert cases.better("us", 10.0, 15.0) == 1.5
    assert cases.better("us", None, 15.0) is None
    assert cases.better("GB/s", 10.0, 0.0) is None


def test_bars():
    assert cases.bar_of("fwd-d128-full-4k", BARS) == cases.Bar(figure=680.0)
    assert cases.bar_of("fwd-d96-causal-1k", BARS) == cases.Bar(ratio=1.0)
    assert cases.bar_of("fwd-d192-causal-1k", BARS) == cases.Bar(ratio=0.9)
    assert cases.bar_of("decode-slabs-b1-8k-q1", BARS) == cases.Bar()


def test_measures(result):
    found = [report.measures(r, result["ceilings"], BARS) for r in result["rows"]]
    assert found[0]["flash"] == pytest.approx(730 / 340)
    assert found[0]["bar"] == pytest.approx(730 / 680)
    assert found[0]["ceiling"] == pytest.approx(730 / 800)
    assert found[1]["bar"] == pytest.approx(0.8)
    assert found[1]["cudnn"] is None
    assert found[2] == {"flash": None, "cudnn": None, "bar": None, "ceiling": pytest.approx(1840 / 4200)}
    assert found[3]["bar"] == pytest.approx(12 / 15)
    assert report.failing(result, BARS) == ["fwd-d96-causal-1k", "host-forward"]


def test_page(result):
    page = report.markdown(result, BARS)
    assert "| fwd-d128-full-4k | 340 | 660 | 730 | 2.15 | 1.11 | 680 | 1.07 | 91 % |" in page
    assert "| fwd-d96-causal-1k | 250 | - | 200 | 0.80 | - | 1.0 x FLASH | 0.80 | 25 % |" in page
    assert "| host-forward | 18.0 | - | 15.0 | 1.20 | - | 12 | 0.80 | - |" in page
    assert "CUDNN refuses some of these: No <available> kernel" in page
    assert "Below their bars: fwd-d96-causal-1k, host-forward." in page
    assert "0123456789ab" in page
    assert "580.1" in page


def test_chart(result):
    tree = ElementTree.fromstring(report.chart(result, BARS))
    titles = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}title")]
    assert "fwd-d128-full-4k flash_attn 730" in titles
    assert len(titles) == sum(len(r["figures"]) for r in result["rows"])


def test_command(result, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report, "load_bars", lambda: BARS)
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result))
    assert report.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "fwd-d128-full-4k" in printed
    assert "below their bars: fwd-d96-causal-1k host-forward" in printed
    assert report.main([str(path), "--markdown", str(tmp_path / "a.md"), "--chart", str(tmp_path / "a.svg")]) == 0
    assert (tmp_path / "a.md").read_text() == report.markdown(result, BARS)
    assert (tmp_path / "a.svg").read_text() == report.chart(result, BARS)


def test_pages_that_are_kept_are_those_of_their_results():
    results = Path(report.__file__).parent / "results"
    for path in results.glob("*.json"):
        result = json.loads(path.read_text())
        assert path.with_suffix(".md").read_text() == report.markdown(result, cases.load_bars()), path
        assert path.with_suffix(".svg").read_text() == report.chart(result, cases.load_bars()), path


def test_what_was_measured_before_an_interruption_is_kept(result, tmp_path, monkeypatch):
    import benchmark

    def measure(case, seconds):
        if case.name.endswith("-4k"):
            raise KeyboardInterrupt
        return row(case.name, 600.0, 300.0)

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(benchmark, "ceilings", lambda seconds: dict(result["ceilings"]))
    monkeypatch.setattr(benchmark, "state", dict)
    monkeypatch.setattr(benchmark, "environment", lambda commit, before, after: result["environment"])
    monkeypatch.setattr(benchmark.flash_attn, "supported", lambda device: (True, ""))
    monkeypatch.setattr(benchmark.signal, "signal", lambda number, handler: None)
    with pytest.raises(KeyboardInterrupt):
        benchmark.main(["--only", "fwd-d128-full-*", "--json", str(tmp_path / "result.json")])
    saved = json.loads((tmp_path / "result.json").read_text())
    assert [found["name"] for found in saved["rows"]] == ["fwd-d128-full-1k"]
