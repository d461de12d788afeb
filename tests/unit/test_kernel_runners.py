"""The runners of the kernel tests: how cases are dealt, what becomes of a process that dies or hangs, and verdicts."""

import os
import time

import pytest
import sample
from sample import Sample, deal, sample_all


def test_every_case_is_dealt_once_and_to_a_process_of_its_family():
    for processes in (1, 2, 5, 14):
        hands = deal(100, 1000, ["any", "sm90"], processes)
        assert len(hands) == max(2, processes)
        assert all(len({s.family for s in hand}) == 1 for hand in hands)
        assert sorted(s.seed for hand in hands for s in hand) == list(range(100, 1100))
        sizes = [len(hand) for hand in hands]
        assert max(sizes) < 3 * min(sizes)


def test_a_number_is_the_same_case_in_every_run():
    numbers = range(40)
    assert [Sample.of(n, ["any", "sm90"]) for n in numbers] == [Sample.of(n, ["any", "sm90"]) for n in numbers]
    assert {Sample.of(n, ["any", "sm90"]).kind for n in numbers} == set(sample.KINDS)
    for n in numbers:
        assert Sample.parse(str(Sample.of(n, ["any"]))) == Sample.of(n, ["any"])
    with pytest.raises(ValueError, match="no kind of case"):
        Sample.parse("nothing:any:3")


def test_a_failing_case_says_how_to_run_it_again():
    again = sample.again(Sample("cache", "sm90", 12))
    assert again == "again: python tests/kernels/sample.py --case cache:sm90:12"


def pretend(samples, done, reports):
    """A process: 7 is wrong, 11 kills it, and 13 never ends."""
    for s in samples:
        if s.seed == 7:
            reports.put((s, ["is wrong"]))
        if s.seed == 11:
            os._exit(9)
        if s.seed == 13:
            time.sleep(60)
        done.value += 1


def test_what_dies_or_hangs_is_reported_and_the_rest_is_run(capfd):
    hands = deal(0, 40, ["any"], 3)
    failures, run = sample_all(hands, 60, pretend, patience=5.0)
    assert run == 40
    assert {s.seed: lines for s, lines in failures.items()} == {
        7: ["is wrong"],
        11: ["the process died with exit code 9"],
        13: ["took longer than 5 s"],
    }
    assert sample.again(Sample.of(13, ["any"])) in capfd.readouterr().out


def test_a_run_that_is_out_of_time_says_so():
    hands = deal(13, 1, ["any"], 1)
    begin = time.monotonic()
    failures, run = sample_all(hands, 1.0, pretend)
    assert (failures, run) == ({}, 0)
    assert time.monotonic() - begin < 20
