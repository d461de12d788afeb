"""Random cases by the thousands, dealt to several processes that have the GPU together:

python tests/kernels/sample.py --cases 20000 --processes 14

Case n is of a kind (plain attention, any features, a KV cache, FP8) and of a choice of kernels (the dispatcher's own,
and each faster family wherever it can serve) that follow from n, and n is its seed: every run with the same kernel set
draws the same. Fails, with a line for each case that runs it again alone, where a result is wrong, where a process
dies, and where a case takes longer than a minute.
"""

import argparse
import multiprocessing
import os
import queue
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("plain", "feature", "feature", "cache", "fp8")  # in the order, and as often, as they are dealt
ANY = "any"  # the dispatcher's choice
PATIENCE_S = 60.0
MOST_FAILURES = 50


@dataclass(frozen=True)
class Sample:
    """One case: the kind, the family that is asked for (or ANY), and the seed."""

    kind: str
    family: str
    seed: int

    @classmethod
    def of(cls, number, families, kinds=KINDS):
        return cls(kinds[number // len(families) % len(kinds)], families[number % len(families)], number)

    @classmethod
    def parse(cls, text):
        kind, family, seed = text.split(":")
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of case; there are {', '.join(sorted(set(KINDS)))}")
        return cls(kind, family, int(seed))

    def __str__(self):
        return f"{self.kind}:{self.family}:{self.seed}"


def deal(first, cases, families, processes, kinds=KINDS):
    """A list of samples for each process; a process has one family, which is chosen once in its life."""
    processes = max(processes, len(families))
    hands = [[] for _ in range(processes)]
    for number in range(first, first + cases):
        sample = Sample.of(number, families, kinds)
        place = families.index(sample.family)
        of_family = hands[place :: len(families)]
        of_family[number // len(families) % len(of_family)].append(sample)
    return [hand for hand in hands if hand]


def run(sample):
    """Lines saying what is wrong with a sample; an empty list if nothing is. In a process of its family."""
    import cache_cases
    import feature_cases
    import fp8_cases
    import random_cases
    from kernel_set import DTYPES, FP8_KERNELS, largest_head_dim
    from memory import poison

    import flash_attn

    def limits(ops, seqlen=600):
        dtypes = tuple(DTYPES.values())
        head_dim = min(largest_head_dim(op, dtype, "general") for op in ops for dtype in dtypes)
        return feature_cases.Limits(dtypes, head_dim, seqlen)

    if sample.kind == "plain":
        case = random_cases.draw(sample.seed)
        wrong = random_cases.run(case, flash_attn.flash_attn_func, before=poison)
    elif sample.kind == "feature":
        case = feature_cases.draw(sample.seed, limits(("fwd", "bwd")))
        wrong = feature_cases.run(case, before=poison)
    elif sample.kind == "cache":
        case = cache_cases.draw(sample.seed, limits(("decode",), 1000))
        wrong = cache_cases.run(case, before=poison)
    else:
        head_dim = max(kernel.head_dim for kernel in FP8_KERNELS if kernel.mask == "general")
        case = fp8_cases.draw(sample.seed, feature_cases.Limits(tuple(DTYPES.values()), head_dim))
        wrong = fp8_cases.run(case, before=poison)
    return [str(case), *wrong] if wrong else []


def work(samples, done, reports):
    """A process: ``done`` counts the samples it has finished, ``reports`` takes what is wrong with each that fails."""
    family = samples[0].family
    os.environ.pop("FLASH_ATTN_FAMILY", None)
    if family != ANY:
        os.environ["FLASH_ATTN_FAMILY"] = family
    from memory import fill_pool

    # From the thread that autograd starts, which has no context yet: of no account.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    fill_pool(small=16, large=2)
    for sample in samples:
        try:
            wrong = run(sample)
        except Exception:
            wrong = [traceback.format_exc(limit=-4)]
        if wrong:
            reports.put((sample, wrong))
        done.value += 1
        if wrong and not gpu_works():
            # Nothing does any more in this process. It ends, and another one goes on behind this sample.
            reports.close()
            reports.join_thread()
            os._exit(1)


def gpu_works():
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


class Worker:
    """A process with its hand, watched; replaced by another one where it dies or hangs."""

    def __init__(self, context, samples, reports, target, patience):
        self.context, self.samples, self.reports = context, samples, reports
        self.target, self.patience = target, patience
        self.finished = 0
        self.start()

    def start(self):
        self.done = self.context.Value("q", 0, lock=False)
        self.seen, self.since = 0, time.monotonic()
        rest = self.samples[self.finished :]
        self.process = self.context.Process(target=self.target, args=(rest, self.done, self.reports), daemon=True)
        self.process.start()

    def look(self):
        """(still at work, (sample, lines) of what has just gone wrong with the process or None)."""
        if self.done.value != self.seen:
            self.seen, self.since = self.done.value, time.monotonic()
        alive = self.process.is_alive()
        if alive and time.monotonic() - self.since < self.patience:
            return True, None
        what = f"took longer than {self.patience:.0f} s"
        if alive:
            self.process.kill()
        self.process.join()
        if not alive:
            what = f"the process died with exit code {self.process.exitcode}"
        reported = self.process.exitcode == 1 and self.done.value > 0
        self.finished += self.done.value
        if self.finished >= len(self.samples):
            return False, None
        failure = None
        if not reported:
            failure = (self.samples[self.finished], [what])
            self.finished += 1
        if self.finished < len(self.samples):
            self.start()
            return True, failure
        return False, failure


def sample_all(hands, seconds, target=work, patience=PATIENCE_S):
    """({sample: lines} of those that failed, how many were run). ``target`` is what a process does."""
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    failures, end = {}, time.monotonic() + seconds
    workers = [Worker(context, hand, reports, target, patience) for hand in hands]
    at_work = list(workers)

    def note(sample, lines):
        failures[sample] = lines
        print("\n".join([f"FAILED {sample}", *lines, again(sample)]), flush=True)

    while at_work:
        try:
            note(*reports.get(timeout=0.2))
        except queue.Empty:
            if time.monotonic() > end or len(failures) >= MOST_FAILURES:
                break
            looks = [(worker, worker.look()) for worker in at_work]
            at_work = [worker for worker, (working, _) in looks if working]
            for _, (_, failure) in looks:
                if failure is not None:
                    note(*failure)
    for worker in at_work:
        worker.process.kill()
        worker.process.join()
    while not reports.empty():
        note(*reports.get())
    run = sum(worker.finished + (worker.done.value if worker in at_work else 0) for worker in workers)
    return failures, run


def again(sample):
    """The command that runs one sample alone."""
    return f"again: python tests/kernels/sample.py --case {sample}"


def main(argv=None):
    """0: all cases were run and none is wrong. 1: some are. 2: not all were run, for want of time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--family", action="append", help="any, or one of the families; may be repeated")
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop there, and fail if not all were run")
    parser.add_argument("--case", action="append", help="such as cache:any:1234: these alone")
    options = parser.parse_args(argv)
    # The installed wheel is what is tested, here and in the processes, which are given this path.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    from conftest import what_is_missing

    if missing := what_is_missing():
        print(f"tests/kernels: {missing}", file=sys.stderr)
        return 2
    from kernel_set import FP8_KERNELS, faster_families

    faster = faster_families()
    families = options.family or [ANY, *faster]
    fp8 = any(kernel.family in faster for kernel in FP8_KERNELS)
    hands = [[Sample.parse(text)] for text in options.case or ()]
    hands = hands or deal(options.seed, options.cases, families, options.processes, KINDS if fp8 else KINDS[:-1])
    cases = sum(map(len, hands))
    begin = time.monotonic()
    failures, run_count = sample_all(hands, options.seconds)
    taken, asked = time.monotonic() - begin, " ".join(sorted({hand[0].family for hand in hands}))
    print(
        f"{run_count} of {cases} cases, {len(failures)} failed, {taken:.1f} s, {len(hands)} processes, families {asked}"
    )
    if failures:
        return 1
    return 0 if run_count == cases else 2


if __name__ == "__main__":
    sys.exit(main())
